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

  // How many rows of `some` planes from plane `first` on are of this task or of those before.
  JAXSPARSE_INLINE int64_t RowsBefore(int64_t task_end, int64_t first, int64_t some) const {
    const int64_t pieces = planes * parts * task_end / tasks_ - first * parts;
    return Between(0, pieces / parts * rows + rows * (pieces % parts) / parts, some * rows);
  }

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

// Rows of one plane of a result. Rows shorter than a vector are written one after the other, each
// over the begin of the next one, of the next plane, too, but for the last of a task.
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

// Vector by vector down a band of rows, so that what a row of the source is loaded for serves every
// row of windows that reads it.
template <typename T, int kStride>
void Planes(const DepthwiseProblem& p, const Direction& d, Workers& workers) {
  constexpr int kBand = 4;
  using Rows = PaddedRows<T, kStride, kBand>;
  const PlaneTasks tasks(p.batch.count * p.Planes(), d.rows, d.rows * d.columns * 12, workers);
  if (d.columns == 0) return;
  // The last vector is moved back over columns of the one before it, so that it is full.
  const int64_t last_column = d.columns < kLanes ? 0 : d.columns - kLanes;
  ParallelFor(workers, tasks.count(), [&](int64_t task) {
    const AlignedFloats memory(Rows::Memory(d.columns, d.width));
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
      const int64_t end = tasks.RowsBefore(task + 1, entry * p.Planes(), p.Planes()) * d.columns;
      const ResultRows<T> results{out, end}, kept{preactivation, end};
      const T* source = d.source.At<const T>(p.batch, entry);
      const int64_t size = d.height * d.width;
      rows.Begin(source + plane * size, source + p.Planes() * size);
      for (int64_t row = first; row < last; row += kBand) {
        const typename Rows::Taken taken = rows.Take(kStride * row - d.above);
        const int64_t band = last - row;  // of which the last one may be smaller
        for (int64_t next = 0; next < d.columns; next += kLanes) {
          const int64_t column = next < last_column ? next : last_column;
          Floats sums[kBand] = {bias, bias, bias, bias};
#pragma GCC unroll 16
          for (int source = 0; source < Rows::kRows; ++source) {
#pragma GCC unroll 3
            for (int j = 0; j < kTaps; ++j) {
              Floats x = taken.At(source, j, column);
              KeepInRegister(x);
#pragma GCC unroll 4
              for (int r = 0; r < kBand; ++r) {
                const int i = source - kStride * r;
                if (i >= 0 && i < kTaps) sums[r] += taps[i][j] * x;
              }
            }
          }
          const int64_t left = d.columns - column;
#pragma GCC unroll 4
          for (int r = 0; r < kBand; ++r) {
            if (r >= band) break;
            const int64_t to = at + (row + r) * d.columns + column;
            kept.Write(sums[r], left, to);
            results.Write(Activate<kLanes, float>(p.activation, sums[r]), left, to);
          }
        }
      }
    });
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
    const AlignedFloats memory(Rows::Memory(half, p.columns) + 4 * room);
    float* sums = memory + Rows::Memory(half, p.columns);
    Rows rows(memory, p.columns, p.rows, half, /*left=*/1);
    tasks.ForEach(task, [&](int64_t index, int64_t first, int64_t last) {
      const int64_t entry = index / p.Planes(), plane = index % p.Planes();
      Floats taps[kTaps][kTaps];
      LoadKernel(p.kernel.At<const T>(p.batch, entry) + p.ChannelOf(plane) * kTaps * kTaps, false,
                 taps);
      const OutWriter<T> out(p.x, p.out_dtype, p.batch, entry);
      const int64_t at = plane * p.height * p.width;
      const int64_t end = tasks.RowsBefore(task + 1, entry * p.Planes(), p.Planes()) * p.width;
      const ResultRows<T> results{out, end};
      const T* y = p.y.At<const T>(p.batch, entry);
      const int64_t size = p.rows * p.columns;
      rows.Begin(y + plane * size, y + p.Planes() * size);
      for (int64_t row = first; row < last; ++row) {
        // Window t reads the row by tap i = row + above - 2 t: those of t = from + 1, and from + 0
        // or none.
        const int64_t from = (row + p.above) / 2 - 1;
        const int odd_row = (row + p.above) % 2;
        const typename Rows::Taken taken = rows.Take(from);
        for (int parity = 0; parity < 2; ++parity) {
          // Column 2 q + parity is read by window q + ahead by tap `odd`, and else by the one
          // before by tap 2.
          const int odd = (parity + p.left) % 2, ahead = (parity + p.left) / 2;
          for (int64_t q = 0; q < half; q += kLanes) {
            Floats sum = {};
            for (int i = odd_row; i < kTaps; i += 2) {
              const int of_window = i < 2 ? 1 : 0;
              for (int j = odd; j < kTaps; j += 2) {
                sum += taps[i][j] * taken.At(of_window, 0, q + ahead + (j < 2 ? 1 : 0));
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
    const AlignedFloats memory(Rows::Memory(p.columns, p.width) + p.columns + kLanes);
    float* y_row = memory + Rows::Memory(p.columns, p.width);
    Rows rows(memory, p.width, p.height, p.columns, p.left);
    const LastLanes last_lanes(p.columns);
    tasks.ForEach(task, [&](int64_t index, int64_t, int64_t) {
      const int64_t entry = index / p.channels, channel = index % p.channels;
      Floats sums[kTaps][kTaps] = {};
      for (int64_t image = 0; image < p.images; ++image) {
        const int64_t plane = p.PlaneOf(channel, image), size = p.rows * p.columns;
        const T* all_x = p.x.At<const T>(p.batch, entry);
        const T* all_y = p.y.At<const T>(p.batch, entry);
        rows.Begin(all_x + plane * p.height * p.width, all_x + p.Planes() * p.height * p.width);
        Floats of_image[kTaps][kTaps] = {};
        for (int64_t row = 0; row < p.rows; ++row) {
          const typename Rows::Taken taken = rows.Take(kStride * row - p.above);
          Widened(all_y + plane * size + row * p.columns, p.columns, all_y + p.Planes() * size,
                  last_lanes, y_row);
          for (int64_t column = 0; column < p.columns; column += kLanes) {
            const Floats factor = LoadRaw<kLanes>(y_row + column);
            const bool whole = p.columns - column >= kLanes;
#pragma GCC unroll 3
            for (int i = 0; i < kTaps; ++i) {
#pragma GCC unroll 3
              for (int j = 0; j < kTaps; ++j) {
                const Floats term = factor * taken.At(i, j, column);
                // Behind the last window there may be a NaN of x that no window reads.
                of_image[i][j] += whole ? term : last_lanes.Of(term);
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
