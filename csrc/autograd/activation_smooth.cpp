// Gradients of the smooth activations (ops/activation_smooth.h). They save their input, or their output where
// backward reads that, as stock's do.
//
// In-place forms write over their input. If backward needs it, it comes from its producer or is copied first.
#include "ops/activation_smooth.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include "autograd/activation.h"

namespace patchconv {

using at::Tensor;

namespace {

// An argument that outlives its call.
template <typename Argument>
struct Owned {
  using Type = std::decay_t<Argument>;
};
template <>
struct Owned<std::string_view> {
  using Type = std::string;
};

template <typename Row, typename... Arguments>
class SmoothBackward final : public ActivationNode {
 public:
  SmoothBackward() : ActivationNode(Row::kNode) {}
  std::tuple<typename Owned<Arguments>::Type...> arguments;

 protected:
  variable_list backward(const Tensor& grad) override {
    const Tensor source = smooth::from_output<Row> ? value() : input.get(*this);
    return {call([&](const auto&... more) { return Row::gradient(grad, source, more...); })};
  }
  Tensor apply_to(const Tensor& x) override {
    return call([&](const auto&... more) { return Row::value(x, more...); });
  }
  void apply_to_(Tensor& x) override {
    if constexpr (smooth::has_value_in_place<Row>) {
      call([&](const auto&... more) { return Row::value_(x, more...); });
    } else {
      ActivationNode::apply_to_(x);
    }
  }

 private:
  template <typename Function>
  Tensor call(const Function& function) const {
    return std::apply(function, arguments);
  }
};

// The operators of a row; `Function` is the type of its value.
template <typename Row, typename Function>
struct Smooth;

template <typename Row, typename... Arguments>
struct Smooth<Row, Tensor(const Tensor&, Arguments...)> {
  using Node = SmoothBackward<Row, Arguments...>;

  static Tensor call(const Tensor& x, Arguments... arguments) {
    if (!use_lean_node(x)) return Row::value(x, arguments...);
    const auto node = make_node<Node>(x);
    node->arguments = {typename Owned<Arguments>::Type(arguments)...};
    if constexpr (smooth::from_output<Row>) {
      node->input.note(x);
    } else {
      node->input.keep(x);
    }
    Tensor y;
    {
      const at::AutoDispatchBelowADInplaceOrView guard;
      y = Row::value(x, arguments...);
    }
    LeanNode::attach(y, node);
    if constexpr (smooth::from_output<Row>) node->provide(y);
    return y;
  }

  static Tensor& call_(Tensor& x, Arguments... arguments) {
    if (!use_lean_node(x) || x.is_view()) return Row::value_(x, arguments...);
    if constexpr (requires { typename Row::InPlace; }) {
      using Other = Smooth<typename Row::InPlace, Tensor(const Tensor&, Arguments...)>;
      if (Row::in_place(arguments...)) return Other::call_(x, arguments...);
    }
    torch::autograd::check_inplace(x, /*requires_grad=*/true);
    const auto node = make_node<Node>(x);
    node->arguments = {typename Owned<Arguments>::Type(arguments)...};
    if constexpr (smooth::from_output<Row>) {
      node->input.note(x);
    } else {
      // The input is about to be written over: it comes from its producer if that can rebuild it without
      // saving it, else from a copy.
      const auto link = Link::find(x, /*provide=*/false);
      node->input.keep(link && link->producer->secure() ? x : x.clone());
    }
    {
      const at::AutoDispatchBelowADInplaceOrView guard;
      Row::value_(x, arguments...);
    }
    LeanNode::attach(x, node, /*in_place=*/true);
    if constexpr (smooth::from_output<Row>) node->provide(x);
    return x;
  }
};

TORCH_LIBRARY_IMPL(patchconv, Autograd, m) {
  smooth::for_each_row([&]<typename Row>(Row) {
    using Operators = Smooth<Row, std::remove_pointer_t<std::decay_t<decltype(Row::value)>>>;
    m.impl(Row::kName, &Operators::call);
    if constexpr (smooth::has_operator_in_place<Row>)
      m.impl(smooth::name_in_place<Row>().c_str(), &Operators::call_);
  });
}

}  // namespace

}  // namespace patchconv
