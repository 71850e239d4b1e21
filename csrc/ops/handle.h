// An operator of this library, to be called through the dispatcher with typed arguments. Look it up once:
//     static const auto op = handle<Tensor(const Tensor&)>("relu");
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>

namespace patchconv {

template <typename Signature>
c10::TypedOperatorHandle<Signature> handle(const std::string& name) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(("patchconv::" + name).c_str(), "")
      .typed<Signature>();
}

}  // namespace patchconv
