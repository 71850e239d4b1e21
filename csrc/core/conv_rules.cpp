#include "core/conv_rules.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>

namespace patchconv {

namespace {

using Tables = std::map<int, std::vector<ConvRule>>;

// The tables that readers use; nullptr while no architecture has one.
std::atomic<const Tables*> g_tables{nullptr};
std::mutex g_mutex;  // held by writers

const std::vector<ConvRule>* rules_of(int arch) {
  const Tables* tables = g_tables.load(std::memory_order_acquire);
  if (tables == nullptr) return nullptr;
  const auto found = tables->find(arch);
  return found == tables->end() ? nullptr : &found->second;
}

bool is_one_of(const std::string& value, const std::vector<std::string_view>& choices) {
  return value.empty() || std::find(choices.begin(), choices.end(), value) != choices.end();
}

void check(const ConvRule& rule, size_t number) {
  const std::string head = "conv rule " + std::to_string(number) + ": expected ";
  if (!is_one_of(rule.pass, {"fprop", "dgrad", "wgrad"})) {
    throw std::invalid_argument(head + "pass to be 'fprop', 'dgrad' or 'wgrad', got '" + rule.pass + "'");
  }
  if (!is_one_of(rule.dtype, {"float32", "tf32", "float16", "bfloat16"})) {
    throw std::invalid_argument(head + "dtype to be 'float32', 'tf32', 'float16' or 'bfloat16', got '" +
                                rule.dtype + "'");
  }
  const std::pair<const char*, const ConvRange&> ranges[] = {
      {"groups", rule.groups}, {"sources", rule.sources}, {"outputs", rule.outputs},
      {"taps", rule.taps},     {"stride", rule.stride},   {"places", rule.places}};
  for (const auto& [name, range] : ranges) {
    const auto valid = [](int64_t end) { return end == -1 || end >= 1; };
    if (!valid(range.least) || !valid(range.most) || (range.most >= 0 && range.least > range.most)) {
      throw std::invalid_argument(head + name +
                                  " to be [least, most] with 1 <= least <= most, or -1 for no end, got [" +
                                  std::to_string(range.least) + ", " + std::to_string(range.most) + "]");
    }
  }
}

}  // namespace

bool ConvRule::matches(const ConvQuery& query) const {
  return (pass.empty() || pass == query.pass) && (dtype.empty() || dtype == query.dtype) &&
         (!channels_last || *channels_last == query.channels_last) && groups.holds(query.groups) &&
         sources.holds(query.sources) && outputs.holds(query.outputs) && taps.holds(query.taps) &&
         stride.holds(query.stride) && places.holds(query.places);
}

bool has_conv_rules(int arch) { return rules_of(arch) != nullptr; }

bool prefers_native_kernel(int arch, const ConvQuery& query) {
  const auto* rules = rules_of(arch);
  if (rules == nullptr) return false;
  for (const ConvRule& rule : *rules) {
    if (rule.matches(query)) return rule.native;
  }
  return false;
}

void set_conv_rules(int arch, std::optional<std::vector<ConvRule>> rules) {
  if (arch < 10) {
    throw std::invalid_argument("conv rules: expected an architecture such as 90 for sm_90, got " +
                                std::to_string(arch));
  }
  if (rules) {
    for (size_t i = 0; i < rules->size(); ++i) check((*rules)[i], i);
  }
  const std::lock_guard<std::mutex> lock(g_mutex);
  const Tables* before = g_tables.load(std::memory_order_relaxed);
  auto tables = before ? std::make_unique<Tables>(*before) : std::make_unique<Tables>();
  if (rules) {
    (*tables)[arch] = std::move(*rules);
  } else {
    tables->erase(arch);
  }
  g_tables.store(tables->empty() ? nullptr : tables.get(), std::memory_order_release);
  // Never freed: a reader may still be using the previous tables.
  static auto& kept = *new std::vector<std::unique_ptr<const Tables>>();
  kept.push_back(std::move(tables));
}

}  // namespace patchconv
