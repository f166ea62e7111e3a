// Between natural logarithms and exponentials and those to base 2, which GPUs compute.
#pragma once

namespace jaxsparse {

// In the type of what they are multiplied by: double would make a product of floats one of doubles.
template <typename T>
constexpr T kLog2OfE = static_cast<T>(1.44269504088896340736);
template <typename T>
constexpr T kLn2 = static_cast<T>(0.69314718055994530942);

}  // namespace jaxsparse
