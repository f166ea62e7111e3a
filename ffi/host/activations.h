// The names of activations, as calls have them.
#pragma once

#include "cuda/activation.h"

namespace jaxsparse {

inline constexpr struct {
  const char* name;
  Activation value;
} kActivations[] = {
    {"none", Activation::kNone}, {"relu", Activation::kRelu}, {"gelu", Activation::kGelu}};

}  // namespace jaxsparse
