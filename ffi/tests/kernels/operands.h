// What tests of CPU kernels share: random operands on heap blocks of exactly their size, threads,
// comparisons.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "cpu/dispatch.h"
#include "cpu/parallel.h"

namespace jaxsparse {
namespace {

// Tasks on threads of their own, in no order, as XLA's pool runs them.
class ThreadWorkers final : public Workers {
 public:
  explicit ThreadWorkers(int64_t count = 3) : count_(count) {}
  int64_t count() const override { return count_; }
  void Run(int64_t tasks, void (*task)(void*, int64_t), void* context) override {
    std::vector<std::thread> threads;
    for (int64_t first = 0; first < count(); ++first) {
      threads.emplace_back([=, this] {
        for (int64_t i = tasks - 1 - first; i >= 0; i -= count()) task(context, i);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  void Yield() override { std::this_thread::yield(); }

 private:
  int64_t count_;
};

struct Random {
  std::mt19937 engine;
  int64_t Below(int64_t n) { return std::uniform_int_distribution<int64_t>(0, n - 1)(engine); }
  double Normal() { return std::normal_distribution<double>()(engine); }
};

// A heap block of exactly the elements it holds.
template <typename T>
std::unique_ptr<T[]> Block(int64_t size) {
  return std::unique_ptr<T[]>(new T[static_cast<size_t>(size)]);
}

template <typename T>
std::unique_ptr<T[]> Values(Random& random, int64_t size) {
  auto block = Block<T>(size);
  for (int64_t i = 0; i < size; ++i) {
    const auto value = static_cast<typename Accumulator<T>::type>(random.Normal());
    FromFloat(value, &block[i]);
  }
  return block;
}

template <typename T>
constexpr DType kDType = DType::kFloat32;
template <>
constexpr DType kDType<double> = DType::kFloat64;
template <>
constexpr DType kDType<bfloat16> = DType::kBFloat16;
template <>
constexpr DType kDType<float16> = DType::kFloat16;

void Expect(double actual, double expected, double tolerance, const char* what) {
  if (actual == expected || (std::isnan(actual) && std::isnan(expected))) return;
  if (std::abs(actual - expected) <= tolerance * (1 + std::abs(expected))) return;
  std::printf("FAILED %s: got %g, expected %g\n", what, actual, expected);
  std::exit(1);
}

template <typename T>
constexpr double kTolerance = sizeof(T) == 8   ? 1e-12
                              : sizeof(T) == 4 ? 2e-4
                                               : 5e-2;

}  // namespace
}  // namespace jaxsparse
