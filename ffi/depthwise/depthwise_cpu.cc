// CPU kernels of depthwise convolutions and their transposes. Threads share planes, or rows of a
// plane where planes are few; the transpose in the kernel is shared by channels. So each number is
// computed by one thread in an order of its own, whatever the number of threads.
#include "cpu/activation.h"
#include "cpu/parallel.h"
#include "cpu/pattern.h"
#include "depthwise/depthwise.h"
#include "depthwise/rows_cpu.h"

namespace jaxsparse::JAXSPARSE_ISA {
namespace {

// How the rows of all planes of a result are cut into tasks.
struct PlaneTasks {
  int64_t planes, rows, parts;

  // `work`: multiply-adds of one plane.
  JAXSPARSE_INLINE PlaneTasks(int64_t planes, int64_t rows, int64_t work, Workers& workers)
      : planes(planes), rows(rows), parts(1) {
    constexpr int64_t kPerThread = 8;
    const int64_t wanted = workers.count() == 1 ? 1 : workers.count() * kPerThread;
    const int64_t pays = planes * work / kMinWorkPerTask;
    tasks_ = pays < 1 ? 1 : pays < wanted ? pays : wanted;
    if (tasks_ > planes && planes > 0) parts = Between(1, tasks_ / planes, rows > 0 ? rows : 1);
    if (tasks_ > planes * parts) tasks_ = planes * parts;
  }
  JAXSPARSE_INLINE int64_t count() const { return tasks_; }

  // f(plane, first row, last row) for each piece of a task.
  template <typename F>
  JAXSPARSE_INLINE void ForEach(int64_t task, F&& f) const {
    const int64_t pieces = planes * parts, last = pieces * (task + 1) / tasks_;
    for (int64_t piece = pieces * task / tasks_; piece < last; ++piece) {
      const int64_t part = piece % parts;
      f(piece / parts, rows * part / parts, rows * (part + 1) / parts);
    }
  }

 private:
  int64_t tasks_;
};

// Rows of one plane of a result, written one after the other. A last vector is stored whole, over
// numbers of the next row that are yet to come, but for the rows' end.
template <typename T>
struct ResultRows {
  const OutWriter<T>& out;
  int64_t end;

  JAXSPARSE_INLINE void Write(Floats v, int64_t count, int64_t at) const {
    if (count >= kLanes || at + kLanes <= end) return out.template Write<kLanes>(v, at);
    for (int l = 0; l < kLanes && l < count; ++l) out.Write(v[l], at + l);
  }
};

// The numbers of one channel's kernel, in every lane.
template <typename T>
JAXSPARSE_INLINE void LoadKernel(const T* kernel, bool flipped, Floats (&taps)[kTaps][kTaps]) {
#pragma GCC unroll 9
  for (int i = 0; i < kTaps * kTaps; ++i) {
    const float tap = ToFloat(kernel[flipped ? kTaps * kTaps - 1 - i : i]);
    taps[i / kTaps][i % kTaps] = Broadcast<kLanes>(tap);
  }
}

// A convolution as `Planes` computes it: y of x, or with stride 1 also x of y, which is one by the
// flipped kernel.
struct Direction {
  const Array &source, &result;
  int64_t height, width;  // of the source
  int64_t rows, columns;  // of the result
  int above, left;
  bool flipped;
};

template <typename T, int kStride>
void Planes(const DepthwiseProblem& p, const Direction& d, Workers& workers) {
  using Rows = PaddedRows<T, kStride>;
  const PlaneTasks tasks(p.batch.count * p.Planes(), d.rows, d.rows * d.columns * 12, workers);
  if (d.columns == 0) return;
  ParallelFor(workers, tasks.count(), [&](int64_t task) {
    float* memory = new float[Rows::Memory(d.columns, d.width)];
    Rows rows(memory, d.width, d.height, d.columns, d.left);
    tasks.ForEach(task, [&](int64_t index, int64_t first, int64_t last) {
      const int64_t entry = index / p.Planes(), plane = index % p.Planes();
      const int64_t channel = p.ChannelOf(plane), at = plane * d.rows * d.columns;
      Floats taps[kTaps][kTaps];
      LoadKernel(p.kernel.At<const T>(p.batch, entry) + channel * kTaps * kTaps, d.flipped, taps);
      const Floats bias = Broadcast<kLanes>(
          p.bias.data == nullptr ? 0.0f : ToFloat(p.bias.At<const T>(p.batch, entry)[channel]));
      const OutWriter<T> out(d.result, p.out_dtype, p.batch, entry);
      const OutWriter<T> preactivation(p.preactivation, p.out_dtype, p.batch, entry);
      const int64_t end = at + last * d.columns;
      const ResultRows<T> results{out, end}, kept{preactivation, end};
      rows.Begin(d.source.At<const T>(p.batch, entry) + plane * d.height * d.width);
      for (int64_t row = first; row < last; ++row) {
        rows.Take(kStride * row - d.above);
        for (int64_t column = 0; column < d.columns; column += kLanes) {
          Floats parts[kTaps] = {bias};  // which do not wait for one another
#pragma GCC unroll 3
          for (int j = 0; j < kTaps; ++j) {
#pragma GCC unroll 3
            for (int i = 0; i < kTaps; ++i) parts[i] += taps[i][j] * rows.At(i, j, column);
          }
          const Floats sum = parts[0] + parts[1] + parts[2];
          const int64_t left = d.columns - column, to = at + row * d.columns + column;
          kept.Write(sum, left, to);
          results.Write(Activate<kLanes, float>(p.activation, sum), left, to);
        }
      }
    });
    delete[] memory;
  });
}

// x of y with stride 2: a row or column of x is read by windows of one parity, so by one or two
// taps. Sums of columns of either parity stand apart until a row is written.
template <typename T>
void SpreadPlanes(const DepthwiseProblem& p, Workers& workers) {
  using Rows = PaddedRows<T, 1>;
  const int64_t half = p.width / 2 + 1;  // at least as many columns of either parity
  const PlaneTasks tasks(p.batch.count * p.Planes(), p.height, p.height * p.width * 6, workers);
  ParallelFor(workers, tasks.count(), [&](int64_t task) {
    const int64_t room = half + kLanes;
    float* memory = new float[Rows::Memory(half, p.columns) + 4 * room];
    float* sums = memory + Rows::Memory(half, p.columns);
    Rows rows(memory, p.columns, p.rows, half, /*left=*/1);
    tasks.ForEach(task, [&](int64_t index, int64_t first, int64_t last) {
      const int64_t entry = index / p.Planes(), plane = index % p.Planes();
      Floats taps[kTaps][kTaps];
      LoadKernel(p.kernel.At<const T>(p.batch, entry) + p.ChannelOf(plane) * kTaps * kTaps, false,
                 taps);
      const OutWriter<T> out(p.x, p.out_dtype, p.batch, entry);
      const int64_t at = plane * p.height * p.width;
      const ResultRows<T> results{out, at + last * p.width};
      rows.Begin(p.y.At<const T>(p.batch, entry) + plane * p.rows * p.columns);
      for (int64_t row = first; row < last; ++row) {
        // Window t reads the row by tap i = row + above - 2 t: those of t = from + 1, and from + 0
        // or none.
        const int64_t from = (row + p.above) / 2 - 1;
        const int odd_row = (row + p.above) % 2;
        rows.Take(from);
        for (int parity = 0; parity < 2; ++parity) {
          // Column 2 q + parity is read by window q + ahead by tap `odd`, and else by the one
          // before by tap 2.
          const int odd = (parity + p.left) % 2, ahead = (parity + p.left) / 2;
          for (int64_t q = 0; q < half; q += kLanes) {
            Floats sum = {};
            for (int i = odd_row; i < kTaps; i += 2) {
              const int of_window = i < 2 ? 1 : 0;
              for (int j = odd; j < kTaps; j += 2) {
                sum += taps[i][j] * rows.At(of_window, 0, q + ahead + (j < 2 ? 1 : 0));
              }
            }
            Store<kLanes, float>(sum, sums + parity * room + q);
          }
        }
        float* whole = sums + 2 * room;
        for (int64_t q = 0; q < half; ++q) {
          whole[2 * q] = sums[q];
          whole[2 * q + 1] = sums[room + q];
        }
        for (int64_t column = 0; column < p.width; column += kLanes) {
          results.Write(Load<kLanes>(whole + column), p.width - column,
                        at + row * p.width + column);
        }
      }
    });
    delete[] memory;
  });
}

// The kernel of (x, y): a channel is one thread's. Sums of an image, by lanes, are added up before
// the next one's, which loses fewer digits than one long sum.
template <typename T, int kStride>
void Channels(const DepthwiseProblem& p, Workers& workers) {
  using Rows = PaddedRows<T, kStride>;
  const int64_t channels = p.batch.count * p.channels;
  const PlaneTasks tasks(channels, 1, p.images * p.rows * p.columns * 12, workers);
  ParallelFor(workers, tasks.count(), [&](int64_t task) {
    float* memory = new float[Rows::Memory(p.columns, p.width) + p.columns + kLanes];
    float* y_row = memory + Rows::Memory(p.columns, p.width);
    Rows rows(memory, p.width, p.height, p.columns, p.left);
    tasks.ForEach(task, [&](int64_t index, int64_t, int64_t) {
      const int64_t entry = index / p.channels, channel = index % p.channels;
      Floats sums[kTaps][kTaps] = {};
      for (int64_t image = 0; image < p.images; ++image) {
        const int64_t plane = p.PlaneOf(channel, image), size = p.rows * p.columns;
        const T* y = p.y.At<const T>(p.batch, entry) + plane * size;
        rows.Begin(p.x.At<const T>(p.batch, entry) + plane * p.height * p.width);
        Floats of_image[kTaps][kTaps] = {};
        for (int64_t row = 0; row < p.rows; ++row) {
          rows.Take(kStride * row - p.above);
          Widened(y + row * p.columns, p.columns, y + size, y_row);
          for (int64_t column = 0; column < p.columns; column += kLanes) {
            const Floats factor = LoadRaw<kLanes>(y_row + column);
            const bool whole = p.columns - column >= kLanes;
            const auto there = LanesBelow(p.columns - column);
#pragma GCC unroll 3
            for (int i = 0; i < kTaps; ++i) {
#pragma GCC unroll 3
              for (int j = 0; j < kTaps; ++j) {
                const Floats term = factor * rows.At(i, j, column);
                // Behind the last window there may be a NaN of x that no window reads.
                of_image[i][j] += whole ? term : there ? term : Floats{};
              }
            }
          }
        }
        for (int i = 0; i < kTaps * kTaps; ++i) {
          sums[i / kTaps][i % kTaps] += of_image[i / kTaps][i % kTaps];
        }
      }
      const OutWriter<T> out(p.kernel, p.out_dtype, p.batch, entry);
      for (int i = 0; i < kTaps * kTaps; ++i) {
        out.Write(Sum<kLanes, float>(sums[i / kTaps][i % kTaps]), channel * kTaps * kTaps + i);
      }
    });
    delete[] memory;
  });
}

// f.operator()<T, kStride>(); float64 has no kernels.
template <typename F>
JAXSPARSE_INLINE void Dispatch(const DepthwiseProblem& p, F&& f) {
  DispatchDType(p.dtype, [&]<typename T>() {
    if constexpr (!std::is_same_v<T, double>) {
      p.stride == 1 ? f.template operator()<T, 1>() : f.template operator()<T, 2>();
    }
  });
}

void LaunchForward(const DepthwiseProblem& p, Workers& workers) {
  const Direction direction{p.x, p.y, p.height, p.width, p.rows, p.columns, p.above, p.left, false};
  Dispatch(p, [&]<typename T, int kStride>() { Planes<T, kStride>(p, direction, workers); });
}

void LaunchInput(const DepthwiseProblem& p, Workers& workers) {
  const Direction direction{
      p.y, p.x, p.rows, p.columns, p.height, p.width, kTaps - 1 - p.above, kTaps - 1 - p.left,
      true};
  Dispatch(p, [&]<typename T, int kStride>() {
    if constexpr (kStride == 1) Planes<T, 1>(p, direction, workers);
    else SpreadPlanes<T>(p, workers);
  });
}

void LaunchKernel(const DepthwiseProblem& p, Workers& workers) {
  Dispatch(p, [&]<typename T, int kStride>() { Channels<T, kStride>(p, workers); });
}

constexpr bool Always(const DepthwiseProblem&) { return true; }
constexpr double One(const DepthwiseProblem&) { return 1.0; }

constexpr CpuVariant<DepthwiseProblem> kForward[] = {{"planes", Always, One, LaunchForward}};
constexpr CpuVariant<DepthwiseProblem> kInput[] = {{"planes", Always, One, LaunchInput}};
constexpr CpuVariant<DepthwiseProblem> kKernel[] = {{"channels", Always, One, LaunchKernel}};

}  // namespace

extern constinit const DepthwiseCpuTables kDepthwiseCpuVariants = {
    MakeTable(kForward), MakeTable(kInput), MakeTable(kKernel)};

}  // namespace jaxsparse::JAXSPARSE_ISA
