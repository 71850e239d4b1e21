#include "symbols.h"

#include <elf.h>
#include <link.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <vector>

namespace ptx {

namespace {

// Where the program was loaded: the first of its objects.
uintptr_t load_address() {
  uintptr_t address = 0;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* to) {
        *static_cast<uintptr_t*>(to) = info->dlpi_addr;
        return 1;
      },
      &address);
  return address;
}

std::map<uintptr_t, std::string> functions_of_this_program() {
  std::ifstream file("/proc/self/exe", std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  const auto at = [&](auto& to, size_t offset) { std::memcpy(&to, bytes.data() + offset, sizeof(to)); };
  Elf64_Ehdr header;
  at(header, 0);
  std::vector<Elf64_Shdr> sections(header.e_shnum);
  for (size_t i = 0; i < sections.size(); ++i) at(sections[i], header.e_shoff + i * header.e_shentsize);
  std::map<uintptr_t, std::string> names;
  for (const Elf64_Shdr& section : sections) {
    if (section.sh_type != SHT_SYMTAB) continue;
    const char* text = bytes.data() + sections[section.sh_link].sh_offset;
    for (size_t i = 0; i < section.sh_size / sizeof(Elf64_Sym); ++i) {
      Elf64_Sym symbol;
      at(symbol, section.sh_offset + i * sizeof(symbol));
      if (ELF64_ST_TYPE(symbol.st_info) == STT_FUNC)
        names[load_address() + symbol.st_value] = text + symbol.st_name;
    }
  }
  return names;
}

}  // namespace

std::string symbol_at(const void* function) {
  static const std::map<uintptr_t, std::string> names = functions_of_this_program();
  const auto found = names.find(reinterpret_cast<uintptr_t>(function));
  if (found == names.end()) throw std::runtime_error("no function of this program is at that address");
  return found->second;
}

}  // namespace ptx
