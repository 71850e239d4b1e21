#include "module.h"

#include <algorithm>
#include <bit>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <stdexcept>

namespace ptx {

namespace {

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.front()))) text.remove_prefix(1);
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back()))) text.remove_suffix(1);
  return text;
}

// nvcc gives an unnamed namespace a name that has the file's in it; the compiler of the host does not.
std::string host_name(std::string_view name) {
  const std::string_view mark = "_GLOBAL__N__";
  std::string result(name);
  for (size_t at = result.find(mark); at != std::string::npos; at = result.find(mark, at)) {
    size_t digits = at;
    while (digits > 0 && std::isdigit(static_cast<unsigned char>(result[digits - 1]))) --digits;
    const size_t length = std::stoul(result.substr(digits, at - digits));
    result.replace(digits, at - digits + length, "12_GLOBAL__N_1");
  }
  return result;
}

// The text of a kernel, from its parameters to the end of its body, by its name.
void find_entries(std::string_view text, std::map<std::string, std::string_view>& entries) {
  const std::string_view mark = ".entry ";
  for (size_t at = text.find(mark); at != std::string_view::npos;) {
    const size_t next = text.find(mark, at + 1);
    const size_t name = at + mark.size(), paren = text.find('(', name);
    const size_t length = (next == std::string_view::npos ? text.size() : next) - paren;
    entries.emplace(host_name(trimmed(text.substr(name, paren - name))), text.substr(paren, length));
    at = next;
  }
}

class Reader {
 public:
  Reader(std::string name, std::string_view text) : text_(text) { kernel_.name = std::move(name); }

  Kernel read() {
    const size_t body = text_.find("\n{");
    read_parameters(text_.substr(0, body));
    size_t begin = body;
    // Statements end with ; a label with : and braces stand alone.
    while (begin < text_.size()) {
      const size_t end = text_.find_first_of(";{}\n", begin);
      if (end == std::string_view::npos) break;
      if (text_[end] == '\n' || text_[end] == '}') {
        label(trimmed(text_.substr(begin, end - begin)));
        begin = end + 1;
      } else if (text_[end] == '{' && trimmed(text_.substr(begin, end - begin)).empty()) {
        begin = end + 1;
      } else {
        const size_t semicolon = text_.find(';', begin);
        statement(trimmed(text_.substr(begin, semicolon - begin)));
        begin = semicolon + 1;
      }
    }
    for (const auto& [number, label] : branches_) {
      kernel_.instructions[number].target = static_cast<int32_t>(labels_.at(label));
    }
    return std::move(kernel_);
  }

 private:
  void read_parameters(std::string_view text) {
    size_t offset = 0;
    std::istringstream lines{std::string(text)};
    for (std::string line; std::getline(lines, line, ',');) {
      std::istringstream words(line);
      std::vector<std::string> all;
      for (std::string word; words >> word;) all.push_back(word);
      const auto param = std::find(all.begin(), all.end(), ".param");
      if (param == all.end()) continue;
      size_t align = 0, bytes = 0;
      std::string name;
      for (auto word = param + 1; word != all.end() && name.empty(); ++word) {
        if (*word == ".align") {
          align = std::stoul(*++word);
        } else if ((*word)[0] == '.') {
          bytes = std::stoul(word->substr(2)) / 8;
        } else {
          name = word->substr(0, word->find_first_of(")"));
        }
      }
      if (align == 0) align = bytes;
      if (const size_t bracket = name.find('['); bracket != std::string::npos) {
        bytes = std::stoul(name.substr(bracket + 1));
        name.resize(bracket);
      }
      offset = (offset + align - 1) / align * align;
      kernel_.parameters.push_back({name, bytes, offset});
      offset += bytes;
    }
    kernel_.parameter_bytes = offset;
  }

  void label(std::string_view line) {
    if (line.empty() || line.substr(0, 2) == "//" || line[0] == '.') return;
    if (line.back() != ':') throw std::runtime_error("not understood: " + std::string(line));
    labels_[std::string(line.substr(0, line.size() - 1))] = kernel_.instructions.size();
  }

  // A register's number, by its name: a new one if it is not known.
  uint32_t numbered(const std::string& name) {
    const auto [found, is_new] = numbers_.emplace(name, kernel_.registers);
    if (is_new) ++kernel_.registers;
    return found->second;
  }

  // Registers that are not a row of numbered ones, as inline assembly has: %p<7> is such a row.
  void declare(std::string_view text) {
    const std::string_view name = trimmed(text.substr(text.find_first_of(" \t")));
    if (name.find('<') != std::string_view::npos) return;
    numbered(std::string(name));
    if (text.substr(0, 5) == ".pred") predicates_.insert(std::string(name));
  }
  bool is_predicate(const std::string& name) const {
    return predicates_.count(name) > 0 ||
           (name.substr(0, 2) == "%p" && std::isdigit(static_cast<unsigned char>(name[2])));
  }

  uint32_t value(std::string_view word) {
    const std::string name(word);
    const bool is_new = numbers_.count(name) == 0;
    const uint32_t number = numbered(name);
    if (!is_new) return number;
    if (name[0] == '%') {
      const bool special = name.find('.') != std::string::npos;
      if (special) kernel_.special.emplace_back(number, name);
    } else if (name.substr(0, 2) == "0f" || name.substr(0, 2) == "0d") {
      kernel_.constants.emplace_back(number, std::stoull(name.substr(2), nullptr, 16));
    } else if (std::isdigit(static_cast<unsigned char>(name[0]))) {
      kernel_.constants.emplace_back(number, std::stoull(name, nullptr, 0));
    } else if (name[0] == '-') {
      kernel_.constants.emplace_back(number, static_cast<uint64_t>(std::stoll(name, nullptr, 0)));
    } else if (name.find("raw_shared_memory") != std::string::npos) {
      kernel_.constants.emplace_back(number, 0);
    } else {
      const auto same = [&](const Parameter& p) { return p.name == name; };
      const auto found = std::find_if(kernel_.parameters.begin(), kernel_.parameters.end(), same);
      if (found == kernel_.parameters.end()) throw std::runtime_error("not known: " + name);
      kernel_.addresses.emplace_back(number, found->offset);
    }
    return number;
  }

  void statement(std::string_view line) {
    while (line.substr(0, 2) == "//") line = trimmed(line.substr(std::min(line.find('\n'), line.size())));
    if (line.substr(0, 5) == ".reg ") return declare(trimmed(line.substr(5)));
    if (line.empty() || line[0] == '.') return;
    Instruction instruction;
    instruction.text = line;
    if (line[0] == '@') {
      const size_t space = line.find_first_of(" \t");
      std::string_view name = line.substr(1, space - 1);
      instruction.predicate_is = name[0] != '!';
      if (name[0] == '!') name.remove_prefix(1);
      instruction.predicate = value(name);
      line = trimmed(line.substr(space));
    }
    const size_t end = std::min(line.find_first_of(" \t"), line.size());
    const std::string_view name = line.substr(0, end);
    const std::string_view rest = trimmed(line.substr(end));
    const char* parts = name.substr(0, 4) != "mov." || rest.find('{') == std::string_view::npos ? ""
                        : rest[0] == '{'                                                        ? ".split"
                                                                                                : ".join";
    set_operation(instruction, std::string(name) + parts);
    if (instruction.flow == Flow::kBranch) {
      branches_.emplace_back(kernel_.instructions.size(), std::string(rest));
    } else {
      operands(instruction, rest);
    }
    kernel_.instructions.push_back(instruction);
  }

  // Registers in the order in which they stand, whatever braces and brackets are around them.
  void operands(Instruction& instruction, std::string_view text) {
    size_t count = 0, addresses = 0;
    bool in_address = false;
    for (size_t at = 0; at < text.size();) {
      if (text[at] == '[') in_address = true;
      if (text[at] == ']') {
        in_address = false;
        ++addresses;
      }
      const auto part_of_word = [&](char c) {
        return std::isalnum(static_cast<unsigned char>(c)) || c == '%' || c == '_' || c == '$' || c == '.' ||
               c == '-';
      };
      if (!part_of_word(text[at])) {
        const bool plus = text[at] == '+' && in_address;
        ++at;
        if (!plus) continue;
        size_t used = 0;
        instruction.offsets.at(addresses) = std::stoll(std::string(text.substr(at)), &used);
        at += used;
        continue;
      }
      size_t end = at;
      while (end < text.size() && part_of_word(text[end])) ++end;
      const std::string_view word = text.substr(at, end - at);
      if (instruction.name.substr(0, 10) == "cp.async.c" && is_predicate(std::string(word))) {
        instruction.ignores = value(word);
      } else {
        instruction.registers.at(count++) = value(word);
      }
      at = end;
    }
  }

  std::string_view text_;
  Kernel kernel_;
  std::map<std::string, uint32_t> numbers_;
  std::set<std::string> predicates_;  // that were declared by a name of their own
  std::map<std::string, size_t> labels_;
  std::vector<std::pair<size_t, std::string>> branches_;
};

}  // namespace

Library::Library(const std::string& folder) {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() == ".ptx") files.push_back(entry.path());
  }
  texts_.reserve(files.size());
  for (const auto& file : files) {
    std::ostringstream text;
    text << std::ifstream(file).rdbuf();
    texts_.push_back(text.str());
    find_entries(texts_.back(), entries_);
  }
}

const Kernel& Library::kernel(const std::string& name) {
  std::unique_ptr<Kernel>& kernel = kernels_[name];
  if (!kernel) {
    const auto found = entries_.find(name);
    if (found == entries_.end()) throw std::runtime_error("no PTX has the kernel " + name);
    kernel = std::make_unique<Kernel>(Reader(name, found->second).read());
    contract(*kernel);
  }
  return *kernel;
}

}  // namespace ptx
