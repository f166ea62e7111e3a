// Between natural logarithms and exponentials and those to base 2, which GPUs compute.
#pragma once

namespace jaxsparse {

constexpr double kLog2OfE = 1.44269504088896340736, kLn2 = 0.69314718055994530942;

}  // namespace jaxsparse
