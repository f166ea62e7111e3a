// Depthwise convolutions and their transposes on an emulated GPU, against float64.
#include "depthwise/kernels/depthwise_planes.cu"
#include "depthwise/kernels/depthwise_staged.cu"
#include "depthwise/kernels/depthwise_sums.cu"
#include "device/operands.h"
#include "emulated/gpu.h"

namespace jaxsparse {
namespace {

struct Sizes {
  int64_t channels, images, height, width;
  int above;
  bool channels_first;
};

template <typename T, int kStride, int kLeft>
class Test {
 public:
  explicit Test(const Sizes& sizes, int first) : first_(first) {
    p_.channels = sizes.channels;
    p_.images = sizes.images;
    p_.channels_first = sizes.channels_first;
    p_.height = sizes.height;
    p_.width = sizes.width;
    p_.rows = CeilDivide(sizes.height, kStride);
    p_.columns = CeilDivide(sizes.width, kStride);
    p_.stride = kStride;
    p_.above = sizes.above;
    p_.left = kLeft;
    p_.batch.count = 1;
    x_ = Normal<T>(first + p_.Planes() * p_.height * p_.width);
    y_ = Normal<T>(first + p_.Planes() * p_.rows * p_.columns);
    kernel_ = Normal<T>(first + p_.channels * 9);
    bias_ = Normal<T>(first + p_.channels);
    p_.x = Of(x_, first);
    p_.y = Of(y_, first);
    p_.kernel = Of(kernel_, first);
  }

  // `launch` runs a kernel of the problem.
  template <typename Launch>
  void Forward(Launch&& launch) {
    const auto x = x_, kernel = kernel_;
    auto out = y_, kept = y_;
    DepthwiseProblem p = p_;
    p.y = Of(out, first_);
    p.bias = Of(bias_, first_);
    p.preactivation = Of(kept, first_);
    p.activation = Activation::kRelu;
    launch(p);
    for (int64_t i = 0; i < p.Planes() * p.rows * p.columns; ++i) {
      double sum = Number(bias_, p.ChannelOf(i / (p.rows * p.columns))), most = std::fabs(sum);
      Terms([&](int64_t of_x, int64_t of_y, int64_t of_kernel) {
        if (of_y == i) Add(Number(x, of_x) * Number(kernel, of_kernel), &sum, &most);
      });
      Compare("preactivation", i, Number(kept, i), sum, most);
      Compare("convolution", i, Number(out, i), std::max(sum, 0.0), most);
    }
  }

  template <typename Launch>
  void Input(Launch&& launch) {
    auto out = x_;
    DepthwiseProblem p = p_;
    p.x = Of(out, first_);
    launch(p);
    for (int64_t i = 0; i < p.Planes() * p.height * p.width; ++i) {
      double sum = 0, most = 0;
      Terms([&](int64_t of_x, int64_t of_y, int64_t of_kernel) {
        if (of_x == i) Add(Number(y_, of_y) * Number(kernel_, of_kernel), &sum, &most);
      });
      Compare("transpose in x", i, Number(out, i), sum, most);
    }
  }

  void Kernel() {
    auto out = kernel_;
    DepthwiseProblem p = p_;
    const int64_t blocks = p.channels * DepthwiseSlices(p);
    std::vector<float> parts(static_cast<size_t>(blocks * 9), NAN);
    p.kernel = Of(out, first_);
    p.workspace = {reinterpret_cast<char*>(parts.data()), blocks * 36};
    constexpr DepthwiseSumsConfig kConfig{.stride = kStride, .left = kLeft};
    emulated::Launch(2, kDepthwiseSumThreads, [&] { DepthwiseSlicesOfSums<T, kConfig>(p); });
    emulated::Launch(1, kDepthwiseSumThreads, [&] { DepthwiseSums<T>(p); });
    for (int64_t i = 0; i < p.channels * 9; ++i) {
      double sum = 0, most = 0;
      Terms([&](int64_t of_x, int64_t of_y, int64_t of_kernel) {
        if (of_kernel == i) Add(Number(x_, of_x) * Number(y_, of_y), &sum, &most);
      });
      Compare("transpose in the kernel", i, Number(out, i), sum, most);
    }
  }

 private:
  static void Add(double term, double* sum, double* most) {
    *sum += term;
    *most += std::fabs(term);
  }
  double Number(const std::vector<T>& array, int64_t i) const {
    return ToAccumulator(array[static_cast<size_t>(first_ + i)]);
  }
  void Compare(const char* what, int64_t i, double got, double wanted, double most) const {
    if (!IsClose<T>(got, wanted, most)) Fail(what, kStride, static_cast<int>(i), got, wanted);
  }

  // f(place in x, place in y, place in the kernel) of every product.
  template <typename F>
  void Terms(F&& f) const {
    for (int64_t plane = 0; plane < p_.Planes(); ++plane) {
      for (int64_t row = 0; row < p_.rows; ++row) {
        for (int64_t column = 0; column < p_.columns; ++column) {
          for (int64_t i = 0; i < 9; ++i) {
            const int64_t h = kStride * row - p_.above + i / 3,
                          w = kStride * column - kLeft + i % 3;
            if (h < 0 || h >= p_.height || w < 0 || w >= p_.width) continue;
            f((plane * p_.height + h) * p_.width + w, (plane * p_.rows + row) * p_.columns + column,
              p_.ChannelOf(plane) * 9 + i);
          }
        }
      }
    }
  }

  int first_;
  DepthwiseProblem p_;
  std::vector<T> x_, y_, kernel_, bias_;
};

template <typename T>
int BlocksOf(const DepthwiseProblem& p, bool transposed) {
  const int64_t planes = DepthwiseStagedPlanes(p, transposed, sizeof(T));
  return static_cast<int>(CeilDivide(p.Planes(), planes));
}

template <typename T, int kStride, int kLeft>
void All(const Sizes& sizes, int first) {
  constexpr int kColumns = sizeof(T) == 2 ? 8 : 4;  // as the host says
  Test<T, kStride, kLeft> test(sizes, first);
  test.Forward([](const DepthwiseProblem& p) {
    constexpr DepthwisePlanesConfig kConfig{
        .stride = kStride, .left = kLeft, .rows = kStride == 1 ? 4 : 2, .columns = kColumns};
    emulated::Launch(2, kDepthwiseThreads, [&] { DepthwisePlanes<T, T, kConfig>(p); });
  });
  test.Forward([](const DepthwiseProblem& p) {
    constexpr DepthwiseStagedConfig kConfig{
        .stride = kStride, .left = kLeft, .rows = sizeof(T) == 2 ? 14 : 7};
    emulated::Launch(BlocksOf<T>(p, false), kDepthwiseStagedThreads,
                     [&] { DepthwiseStaged<T, T, kConfig>(p); });
  });
  test.Input([](const DepthwiseProblem& p) {
    constexpr DepthwisePlanesConfig kConfig{.stride = kStride,
                                            .left = kStride == 1 ? 2 - kLeft : kLeft,
                                            .rows = sizeof(T) == 2 ? 4 : 2,
                                            .columns = kColumns,
                                            .transposed = true};
    emulated::Launch(2, kDepthwiseThreads, [&] {
      if constexpr (kStride == 1) DepthwisePlanes<T, T, kConfig>(p);
      else DepthwiseSpread<T, T, kConfig>(p);
    });
  });
  if constexpr (kStride == 1) {
    test.Input([](const DepthwiseProblem& p) {
      constexpr DepthwiseStagedConfig kConfig{.left = 2 - kLeft, .rows = 14, .transposed = true};
      emulated::Launch(BlocksOf<T>(p, true), kDepthwiseStagedThreads,
                       [&] { DepthwiseStaged<T, T, kConfig>(p); });
    });
  }
  test.Kernel();
}

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  for (const Sizes& sizes : {Sizes{2, 3, 1, 1, 1, true}, Sizes{3, 2, 7, 7, 1, false},
                             Sizes{2, 1, 6, 12, 0, true}, Sizes{1, 2, 5, 8, 2, false}}) {
    All<float, 1, 1>(sizes, 0);
    All<float, 2, 0>(sizes, 0);
    All<bfloat16, 1, 1>(sizes, 1);
    All<float16, 2, 1>(sizes, 4);
  }
  // Rows of whole vectors of 16 bytes, and of 8.
  All<bfloat16, 1, 1>({2, 2, 9, 24, 1, true}, 0);
  All<float16, 1, 0>({2, 1, 6, 12, 1, true}, 0);
  All<bfloat16, 2, 0>({2, 2, 7, 32, 0, false}, 0);
  All<float16, 2, 1>({1, 2, 6, 20, 1, true}, 8);
  // Several tiles of planes, and a last one with less than a whole vector.
  All<float, 1, 1>({3, 5, 20, 21, 1, true}, 0);
  All<bfloat16, 2, 0>({3, 13, 29, 13, 1, false}, 0);
  All<float, 1, 0>({2, 2, 9, 10, 0, true}, 1);
  All<float, 1, 2>({2, 2, 9, 8, 2, true}, 0);
  All<float, 2, 2>({2, 2, 8, 9, 2, true}, 0);
  std::puts("all results agree");
}
