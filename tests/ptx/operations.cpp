#include "warp.h"

namespace ptx {

void set_operation(Instruction& instruction, std::string_view name) {
  static const Operations operations = [] {
    Operations all;
    add_arithmetic(all);
    add_conversions(all);
    add_moves(all);
    add_exchanges(all);
    add_memory(all);
    return all;
  }();
  const auto found = operations.find(name);
  if (found == operations.end()) throw std::runtime_error("not known: " + std::string(name));
  Instruction set = found->second;
  set.name = found->first;
  set.text = instruction.text;
  set.predicate = instruction.predicate;
  set.predicate_is = instruction.predicate_is;
  set.registers = instruction.registers;
  set.offsets = instruction.offsets;
  set.ignores = instruction.ignores;
  instruction = set;
}

}  // namespace ptx
