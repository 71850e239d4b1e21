// Tests of core/, compiled without torch: the geometry against a loop over every tap of a small convolution.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"
#include "core/build_facts.h"
#include "core/conv_rules.h"
#include "core/geometry.h"
#include "core/plan.h"

namespace patchconv {
namespace {

using Values = std::vector<int64_t>;

// Calls use(one of each of the values) for every combination.
template <typename Use>
void each(Use use) {
  use();
}
template <typename Use, typename... More>
void each(Use use, const Values& values, const More&... more) {
  for (const int64_t value : values) each([&](auto... others) { use(value, others...); }, more...);
}

Values up_to(int64_t last, int64_t first = 0) {
  Values values;
  for (; first <= last; ++first) values.push_back(first);
  return values;
}

void test_pieces() {
  const auto check_pieces = [](int64_t size, int64_t pieces) {
    int64_t at = 0;
    for (int64_t i = 0; i < pieces; ++i) {
      const Range piece = piece_of(size, pieces, i);
      CHECK_EQ(piece.begin, at);
      CHECK(piece.size() == size / pieces || piece.size() == size / pieces + 1);
      at = piece.end;
    }
    CHECK_EQ(at, size);
  };
  each(check_pieces, up_to(13), up_to(7, 1));
}

// Every small range must read exactly the hull of its taps, and every big range must be read by exactly the
// hull of the small coordinates that use it.
void check_ranges(int64_t big, int64_t kernel, int64_t stride, int64_t dilation, int64_t before) {
  ConvDim dim{big, 0, kernel, stride, dilation, before, 1};
  dim.small = dim.small_size();
  if (dim.big + dim.pad_before + dim.pad_after < dim.reach()) return;
  for (int64_t begin = 0; begin < dim.small; ++begin) {
    for (int64_t end = begin + 1; end <= dim.small; ++end) {
      const Range read = dim.big_range({begin, end});
      CHECK_EQ(read.begin, begin * stride - before);
      CHECK_EQ(read.end, (end - 1) * stride + (kernel - 1) * dilation - before + 1);
    }
  }
  for (int64_t begin = 0; begin < big; ++begin) {
    const Range users = dim.small_range({begin, begin + 1});
    for (int64_t p = 0; p < dim.small; ++p) {
      bool reads = false;
      for (int64_t r = 0; r < kernel; ++r) reads |= p * stride + r * dilation - before == begin;
      // The hull may contain small coordinates whose taps step over it, but must miss none that reads it.
      if (reads) CHECK(p >= users.begin && p < users.end);
    }
  }
}

void test_padding() {
  const struct {
    PaddingMode mode;
    std::vector<int64_t> expected;  // of coordinates -2 to 5 of a grid of four
  } cases[] = {
      {PaddingMode::kZeros, {-1, -1, 0, 1, 2, 3, -1, -1}},
      {PaddingMode::kReflect, {2, 1, 0, 1, 2, 3, 2, 1}},
      {PaddingMode::kReplicate, {0, 0, 0, 1, 2, 3, 3, 3}},
      {PaddingMode::kCircular, {2, 3, 0, 1, 2, 3, 0, 1}},
  };
  for (const auto& one : cases) {
    CHECK(source_indices(one.mode, {-2, 6}, 4) == one.expected);
    PaddingMode parsed;
    CHECK(parse_padding_mode(padding_mode_name(one.mode), &parsed) && parsed == one.mode);
  }
  PaddingMode parsed;
  CHECK(!parse_padding_mode("mirror", &parsed));
}

// Every coordinate of the padded grid stands in exactly one stretch of exactly one piece: that of its source.
void check_shown_at(PaddingMode mode, int64_t size, int64_t pieces, int64_t before, int64_t after) {
  const int64_t of_mode = mode == PaddingMode::kReflect ? size - 1 : size;
  const int64_t most = mode == PaddingMode::kReplicate ? 9 : of_mode;
  if (pieces > size || before > most || after > most) return;
  ConvDim dim;
  dim.big = size;
  dim.pad_before = before;
  dim.pad_after = after;
  std::vector<int> seen(before + size + after, 0);
  for (int64_t i = 0; i < pieces; ++i) {
    const Range piece = piece_of(size, pieces, i);
    for (const Range place : shown_at(mode, piece, dim)) {
      CHECK(!place.empty() && place.size() <= 3 * piece.size() / 2);
      for (int64_t at = place.begin; at < place.end; ++at) {
        const int64_t source = source_index(mode, at, size);
        CHECK(source >= piece.begin && source < piece.end);
        ++seen[at + before];
      }
    }
  }
  for (const int times : seen) CHECK_EQ(times, 1);
}

void test_shown_at() {
  for (const PaddingMode mode : {PaddingMode::kReflect, PaddingMode::kReplicate, PaddingMode::kCircular}) {
    for (const int64_t size : {1, 2, 5, 8}) {
      const auto check = [&](auto... rest) { check_shown_at(mode, size, rest...); };
      each(check, Values{1, 2, size}, up_to(9), Values{0, 1, 4});
    }
  }
  CHECK_EQ(shown_at(PaddingMode::kZeros, {2, 4}, ConvDim{8, 8, 3, 1, 1, 1, 1}).size(), size_t{1});
  // A thin border is computed together with its neighbour.
  CHECK_EQ(shown_at(PaddingMode::kReplicate, {0, 4}, ConvDim{4, 4, 3, 1, 1, 1, 1}).size(), size_t{1});
}

void check_reads_only_padding(int64_t big, int64_t kernel, int64_t stride, int64_t dilation, int64_t before) {
  ConvDim dim{big, 0, kernel, stride, dilation, before, 3};
  if (big + before + 3 < dim.reach()) return;
  dim.small = dim.small_size();
  bool expected = false;
  for (int64_t p = 0; p < dim.small; ++p) {
    bool reads_grid = false;
    for (int64_t r = 0; r < kernel; ++r) {
      const int64_t i = p * stride + r * dilation - before;
      reads_grid |= i >= 0 && i < big;
    }
    expected |= !reads_grid;
  }
  CHECK_EQ(dim.reads_only_padding(), expected);
}

bool refused(const ConvRule& rule) {
  try {
    set_conv_rules(90, std::vector<ConvRule>{rule});
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

// What matches is asked by tests/conv/test_conv_rules.py.
void test_conv_rules() {
  const ConvQuery query{"fprop", "bfloat16", true, 1, 64, 64, 9, 1, 1000};
  CHECK(!has_conv_rules(90) && !prefers_native_kernel(90, query));
  ConvRule wide;
  wide.native = true;
  wide.places = {100, -1};
  set_conv_rules(90, std::vector<ConvRule>{wide});
  CHECK(has_conv_rules(90) && !has_conv_rules(80));
  CHECK(prefers_native_kernel(90, query) && !prefers_native_kernel(80, query));
  ConvRule bad = wide;
  bad.taps = {2, 1};
  CHECK(refused(bad));
  CHECK(prefers_native_kernel(90, query));  // the old rules stay

  // Readers on other threads see the old table or the new one; each of these tables matches the query.
  std::atomic<bool> stop = false, missed = false;
  std::atomic<int> started = 0;
  std::vector<std::thread> readers;
  for (int i = 0; i < 3; ++i) {
    readers.emplace_back([&] {
      ++started;
      while (!stop) {
        if (!prefers_native_kernel(90, query)) missed = true;
      }
    });
  }
  while (started < 3) std::this_thread::yield();
  for (int i = 0; i < 2000; ++i) {
    set_conv_rules(90, std::vector<ConvRule>(static_cast<size_t>(1 + i % 5), wide));
  }
  stop = true;
  for (auto& reader : readers) reader.join();
  CHECK(!missed);
  set_conv_rules(90, std::nullopt);
  CHECK(!has_conv_rules(90) && !prefers_native_kernel(90, query));
}

// A square image of one byte a coordinate of the big grid and four of the small one, whose convolution takes
// them all at once.
struct PlanCase {
  ConvProblem problem;
  StockCall stock;
  TileCost tile;
  int64_t limit = 0;
  TilePlan plan() const { return make_plan(problem, ConvPass::kSmall, stock, tile, limit); }
};

PlanCase case_of(int64_t size, int64_t kernel, int64_t dilation, int64_t batch, int64_t limit) {
  ConvDim dim{size, 0, kernel, 1, dilation, (kernel - 1) * dilation / 2, (kernel - 1) * dilation / 2};
  dim.small = dim.small_size();
  PlanCase c;
  c.problem.dims = {dim, dim};
  c.problem.batch = batch;
  c.tile = {1, 4, 16};
  c.stock.bytes = batch * 5 * size * size;
  c.limit = limit;
  return c;
}

void check_plan(int64_t size, int64_t kernel, int64_t dilation, int64_t batch, int64_t limit,
                int64_t threads) {
  PlanCase c = case_of(size, kernel, dilation, batch, limit);
  c.tile.threads = threads;
  const TilePlan plan = c.plan();
  CHECK_EQ(plan.whole_bytes, c.stock.bytes);
  if (!plan.tiled) {
    CHECK_EQ(plan.tile_bytes, c.stock.bytes);
    const bool holes = dilation > 1 && kernel > 1;
    CHECK(plan.reason == PlanReason::kFits ? c.stock.bytes <= limit
                                           : plan.reason == PlanReason::kNoGain && holes);
    return;
  }
  CHECK(plan.reason == PlanReason::kTooLarge);
  CHECK(c.stock.bytes > limit);
  CHECK(plan.batch_step >= 1 && plan.batch_step <= batch);
  const int64_t tiles = (batch + plan.batch_step - 1) / plan.batch_step * plan.tiles_per_image();
  CHECK(plan.in_flight >= 1 && plan.in_flight <= std::min(threads, tiles));
  bool smallest = plan.batch_step == 1;
  for (const int64_t pieces : plan.pieces) {
    CHECK(pieces >= 1 && pieces <= size);
    smallest = smallest && pieces == size;
  }
  // Without holes in the kernel, the limit is kept wherever the smallest tiles do.
  if (dilation == 1 || kernel == 1) CHECK(plan.tile_bytes <= limit || smallest);
  // Each coordinate is read at most four times as often as the kernel has taps, in each dimension.
  const double most = 4.0 * static_cast<double>(kernel);
  CHECK(dilation == 1 || plan.halo_percent <= 100 * (most * most - 1));
}

void test_plans() {
  each(check_plan, Values{1, 7, 64, 200}, Values{1, 3, 5}, Values{1, 2, 30}, Values{1, 3},
       Values{64, 1000, 20000, 1000000}, Values{1, 2});
}

void test_asked_plans() {
  PlanCase c = case_of(10, 3, 1, 2, 1000000);
  c.problem.splits = {3, 20};
  const TilePlan plan = c.plan();
  CHECK(plan.tiled && plan.clamped && plan.reason == PlanReason::kAsked);
  CHECK_EQ(plan.pieces[0], 3);
  CHECK_EQ(plan.pieces[1], 10);
  CHECK_EQ(plan.tiles_per_image(), 30);
  c.problem.splits = {1, 1};  // one call, whatever the limit
  c.limit = 1;
  CHECK(!c.plan().tiled);
  c.problem.batch = 0;
  CHECK(c.plan().reason == PlanReason::kEmpty);
}

void test_build_facts() {
  // Nothing of csrc/cuda/ is compiled in here, so no facts are registered.
  CHECK(!cuda_facts().has_value());
  register_cuda_facts({13000, "8.0"});
  CHECK(cuda_facts().has_value());
  CHECK_EQ(cuda_facts()->runtime_version, 13000);
}

}  // namespace
}  // namespace patchconv

int main() {
  using namespace patchconv;
  const Values strides{1, 2, 3};
  test_pieces();
  each(check_ranges, Values{1, 5, 8, 11}, Values{1, 2, 3, 5}, strides, Values{1, 2}, Values{0, 1, 3});
  each(check_reads_only_padding, Values{1, 2, 5}, Values{1, 2, 3}, strides, Values{1, 2, 4}, up_to(5));
  test_padding();
  test_shown_at();
  test_conv_rules();
  test_plans();
  test_asked_plans();
  test_build_facts();
  return check::report();
}
