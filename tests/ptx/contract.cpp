#include <string>

#include "module.h"

namespace ptx {

namespace {

// Of a block of instructions without branches: which product each register holds, and how often each was
// written.
struct Products {
  struct Product {
    uint32_t a, b;
    int writes_of_a, writes_of_b;
  };
  std::map<uint32_t, Product> of;
  std::map<uint32_t, int> writes;

  // The product that the register holds, if its factors are still there.
  const Product* find(uint32_t reg) {
    const auto found = of.find(reg);
    if (found == of.end()) return nullptr;
    const Product& product = found->second;
    const bool same = writes[product.a] == product.writes_of_a && writes[product.b] == product.writes_of_b;
    return same ? &product : nullptr;
  }
  void note(const Instruction& instruction, const std::string& type) {
    for (size_t i = 0; i < instruction.results; ++i) {
      ++writes[instruction.registers[i]];
      of.erase(instruction.registers[i]);
    }
    const auto& r = instruction.registers;
    if (instruction.name == "mul." + type && instruction.predicate == kNone && r[0] != r[1] && r[0] != r[2]) {
      of[r[0]] = {r[1], r[2], writes[r[1]], writes[r[2]]};
    }
  }
};

void contract(Kernel& kernel, const std::string& type) {
  std::vector<bool> begins(kernel.instructions.size() + 1, false);
  for (const Instruction& instruction : kernel.instructions) {
    if (instruction.flow == Flow::kBranch) begins[static_cast<size_t>(instruction.target)] = true;
  }
  Products products;
  for (size_t i = 0; i < kernel.instructions.size(); ++i) {
    Instruction& instruction = kernel.instructions[i];
    if (begins[i] || instruction.flow == Flow::kBranch) products = Products();
    const bool sum = instruction.name == "add." + type, difference = instruction.name == "sub." + type;
    const Products::Product* left = nullptr;
    const Products::Product* right = nullptr;
    if (sum || difference) {
      left = products.find(instruction.registers[1]);
      right = products.find(instruction.registers[2]);
    }
    if (left != nullptr || right != nullptr) {
      const auto r = instruction.registers;
      const Products::Product product = left != nullptr ? *left : *right;
      const char* name = sum ? "fma.rn." : left != nullptr ? "fma.minus." : "fma.from.";
      set_operation(instruction, name + type);
      instruction.registers[1] = product.a;
      instruction.registers[2] = product.b;
      instruction.registers[3] = left != nullptr ? r[2] : r[1];
    }
    products.note(instruction, type);
  }
}

}  // namespace

void contract(Kernel& kernel) {
  contract(kernel, "f32");
  contract(kernel, "f64");
}

}  // namespace ptx
