// Attention of random operands over a random block mask, and what it is in float64.
#pragma once

#include "device/attention_scores.h"
#include "device/block_mask_arrays.h"

namespace jaxsparse {

struct AttentionSize {
  int64_t queries, keys;
  int64_t groups = 1, per_group = 1;
  int64_t batch = 1;
};

enum class MaskKind {
  kAll,
  kCausal,
  kScattered,  // all cells partial, rows 3 and 70 empty
  kCells,      // cells of random states, and rows of tiles without any
  kNothing
};

struct AttentionOptions {
  MaskKind mask = MaskKind::kCells;
  bool mask_of_group = false, mask_of_head = false, mask_of_entry = false;  // ones of their own
  bool shared_keys = false;                                                 // by all batch entries
  double scale = 0.37;                                                      // of scores
  bool rising = false;                  // scores, from tile to tile
  Disorder disorder = Disorder::kNone;  // kNan or kInfinite: in a key and in a value
  float dropout_rate = 0.25f;           // of kernels that drop probabilities
};

// Calls with sizes and options that have masks, heads that share them and keys, numbers that are
// not finite and lists that are wrong.
template <typename Check>
void ForEachMask(const Check& check) {
  check({1, 1}, {.mask = MaskKind::kAll});
  check({200, 64}, {.mask = MaskKind::kNothing});
  check({200, 127}, {.mask = MaskKind::kCausal});
  check({70, 300}, {.mask = MaskKind::kScattered});
  check({130, 70, 2, 2, 2}, {.mask_of_group = true, .mask_of_head = true});
  check({70, 130, 1, 3, 2}, {.mask_of_head = true, .mask_of_entry = true, .shared_keys = true});
  for (const Disorder disorder : {Disorder::kNan, Disorder::kInfinite, Disorder::kWrongIndices}) {
    check({80, 140}, {.mask = MaskKind::kScattered, .disorder = disorder});
    check({130, 150, 2}, {.disorder = disorder});
  }
}

// Operands, and attention of them in float64.
template <typename T, int kHeadSize, int kValueSize, typename Scoring = NoScoring>
class AttentionTest {
 public:
  AttentionTest(const AttentionSize& size, const AttentionOptions& options)
      : size_(size),
        options_(options),
        key_entries_(options.shared_keys ? 1 : size.batch),
        mask_groups_(options.mask_of_group ? size.groups : 1),
        mask_per_group_(options.mask_of_head ? size.per_group : 1),
        mask_entries_(options.mask_of_entry ? size.batch : 1),
        query_(Normal<T>(size.batch * size.queries * Heads() * kHeadSize)),
        key_(Normal<T>(key_entries_ * size.keys * size.groups * kHeadSize)),
        value_(Normal<T>(key_entries_ * size.keys * size.groups * kValueSize)),
        stored_(static_cast<size_t>(mask_groups_ * mask_per_group_ * mask_entries_ * size.queries *
                                    size.keys)),
        mask_(MakeMask(false)),
        transposed_mask_(MakeMask(true)),
        heat_(Normal<float>(OfScores(size.batch * size.queries))),
        bias_(Normal<bfloat16>(OfScores(Heads() * size.queries * size.keys))),
        table_(Normal<float>(OfScores(Heads() * Distances()))),
        ids_(static_cast<size_t>(OfScores(size.batch * size.keys))),
        tilt_(Normal<float>(OfScores(Heads() * size.keys))),
        seeds_(static_cast<size_t>(OfScores(size.batch * Heads()))),
        rate_{options.dropout_rate} {
    for (int32_t& id : ids_) id = static_cast<int32_t>(generator() % 3);
    for (uint32_t& seed : seeds_) seed = static_cast<uint32_t>(generator());
    const size_t of_position = static_cast<size_t>(size.groups * kHeadSize);
    for (size_t i = 0; options.rising && i < key_.size(); ++i) {
      const auto position = static_cast<float>(i / of_position % static_cast<size_t>(size.keys));
      key_[i] = FromFloat<T>(ToAccumulator(key_[i]) * (1 + position / 16));
    }
    const float wrong = options.disorder == Disorder::kNan ? NAN : INFINITY;
    if (options.disorder == Disorder::kNan || options.disorder == Disorder::kInfinite) {
      key_[key_.size() / 3] = FromFloat<T>(wrong);
      value_[value_.size() / 2] = FromFloat<T>(wrong);
      value_[value_.size() - 1] = FromFloat<T>(-wrong);
    }
    if (options.disorder != Disorder::kWrongIndices) return;
    mask_.Spoil();
    transposed_mask_.Spoil();
  }

  // What both problems have.
  template <typename Problem>
  void WriteTo(Problem* problem) {
    Problem& p = *problem;
    p.batch.rank = 1;
    p.batch.count = p.batch.sizes[0] = size_.batch;
    p.dtype = std::is_same_v<T, float>      ? DType::kFloat32
              : std::is_same_v<T, bfloat16> ? DType::kBFloat16
                                            : DType::kFloat16;
    p.queries = size_.queries;
    p.keys = size_.keys;
    p.groups = size_.groups;
    p.per_group = size_.per_group;
    p.head_size = kHeadSize;
    p.value_size = kValueSize;
    p.scale = Scale();
    p.mask = mask_.AsOperand(mask_groups_, mask_per_group_, mask_entries_);
    const int64_t key_entry = key_entries_ > 1 ? size_.keys * size_.groups : 0;
    p.query = Of(query_, 0, size_.queries * Heads() * kHeadSize);
    p.key = Of(key_, 0, key_entry * kHeadSize);
    p.value = Of(value_, 0, key_entry * kValueSize);
    if (Scoring::Function::kExists) {
      p.scores.values[0] = Of(heat_, 0, size_.queries);
      p.scores.values[1] = Of(bias_, 0, 0);
      p.scores.values[2] = Of(table_, 0, 0);
      p.scores.values[3] = Of(ids_, 0, size_.keys);
      p.scores.values[4] = Of(tilt_, 0, 0);
      p.scores.gradients = Scoring::Function::kGradients;
      if constexpr (Scoring::Function::kExists) {
        std::copy_n(Scoring::Function::kSums, p.scores.gradients, p.scores.sums);
      }
    }
    if (Scoring::kOffsets) p.scores.offsets = Of(offsets_, 0, 0);
    if (Scoring::kDrops) {
      p.scores.seeds = Of(seeds_, 0, Heads());
      p.scores.dropout_rate = Of(rate_, 0, 0);
    }
  }
  MaskTiles TransposedMask() {
    return transposed_mask_.AsOperand(mask_groups_, mask_per_group_, mask_entries_);
  }

  const AttentionSize& size() const { return size_; }
  int64_t Heads() const { return size_.groups * size_.per_group; }
  int64_t Distances() const { return size_.queries + size_.keys - 1; }
  bool IsWrong() const { return AreWrong(options_.disorder); }

  // Calls with each batch entry, head and query.
  template <typename Function>
  void ForEachRow(const Function& function) const {
    for (int64_t entry = 0; entry < size_.batch; ++entry) {
      for (int64_t head = 0; head < Heads(); ++head) {
        for (int64_t t = 0; t < size_.queries; ++t) function(entry, head, t);
      }
    }
  }
  // Places of a query's number, of its vector and of a vector of keys, where no entry shares keys.
  int64_t NumberAt(int64_t entry, int64_t head, int64_t t) const {
    return (entry * Heads() + head) * size_.queries + t;
  }
  int64_t VectorAt(int64_t entry, int64_t head, int64_t t) const {
    return (entry * size_.queries + t) * Heads() + head;
  }
  int64_t KeyVectorAt(int64_t entry, int64_t head, int64_t u) const {
    return (entry * size_.keys + u) * size_.groups + head / size_.per_group;
  }

  bool Sees(int64_t entry, int64_t head, int64_t t, int64_t u) const {
    return stored_[((MaskOf(entry, head) * size_.queries) + t) * size_.keys + u];
  }
  // Where a head's vectors begin.
  const T* Query(int64_t entry, int64_t head, int64_t t) const {
    return &query_[VectorAt(entry, head, t) * kHeadSize];
  }
  const T* Key(int64_t entry, int64_t head, int64_t u) const {
    return &key_[KeyVectorAt(OwnKeys(entry), head, u) * kHeadSize];
  }
  const T* Value(int64_t entry, int64_t head, int64_t u) const {
    return &value_[KeyVectorAt(OwnKeys(entry), head, u) * kValueSize];
  }

  double Scale() const { return options_.scale; }

  // What becomes of a score, and its derivative.
  double ScoreOf(int64_t entry, int64_t head, int64_t t, int64_t u, double score,
                 double* derivative) const {
    *derivative = 1;
    if (!Scoring::Function::kExists) return score;
    const double heat = heat_[entry * size_.queries + t], power = std::tanh(0.5 * score);
    const double table = table_[head * Distances() + t - u + size_.keys - 1];
    const double bias = ToAccumulator(bias_[(head * size_.queries + t) * size_.keys + u]);
    const auto [row, column] = PositionOf(t, u);
    *derivative = heat * (1 - power * power);
    return 2 * power * heat + bias + table + 0.5 * tilt_[head * size_.keys + u] +
           0.01 * static_cast<double>(row - column) * ids_[entry * size_.keys + u];
  }
  // By what a probability is multiplied.
  double KeptOf(int64_t entry, int64_t head, int64_t t, int64_t u) const {
    if (!Scoring::kDrops) return 1;
    const auto mix = [](uint32_t x) {
      x = (x ^ x >> 16) * 0x7feb352du;
      x = (x ^ x >> 15) * 0x846ca68bu;
      return x ^ x >> 16;
    };
    const auto [row, column] = PositionOf(t, u);
    const uint32_t of_row = mix(mix(static_cast<uint32_t>(row)) + seeds_[entry * Heads() + head]);
    const auto unsigned_column = static_cast<uint32_t>(column);
    const uint32_t bits = mix(of_row + unsigned_column / 2 * 0x9e3779b9u);
    const uint32_t half = unsigned_column % 2 != 0 ? bits / 65536 : bits % 65536;
    return half >= static_cast<uint32_t>(rate_[0] * 65536) ? 1 / (1 - double(rate_[0])) : 0;
  }

  // A row: its lse, and what each key it sees has as its probability.
  struct Row {
    double lse = -std::numeric_limits<double>::infinity();
    double largest = 0;  // of its scores' absolute values
    std::vector<int64_t> keys;
    std::vector<double> probabilities;
  };
  Row RowOf(int64_t entry, int64_t head, int64_t t) const {
    Row row;
    double most = row.lse, sum = 0;
    for (int64_t u = 0; u < size_.keys; ++u) {
      if (!Sees(entry, head, t, u)) continue;
      double score = 0;
      for (int i = 0; i < kHeadSize; ++i) {
        score +=
            double(ToAccumulator(Query(entry, head, t)[i])) * ToAccumulator(Key(entry, head, u)[i]);
      }
      double derivative;
      score = ScoreOf(entry, head, t, u, score * Scale(), &derivative);
      row.keys.push_back(u);
      row.probabilities.push_back(score);
      most = std::fmax(most, score);
      row.largest = std::fmax(row.largest, std::fabs(score));
    }
    // Where all scores are -infinity, as where there are none, nothing is seen.
    std::vector<double>& scores = row.probabilities;
    if (std::all_of(scores.begin(), scores.end(), [](double s) { return s == -HUGE_VAL; })) {
      scores.assign(scores.size(), 0.0);
      return row;
    }
    for (double& p : row.probabilities) sum += p = std::exp(p - most);
    for (double& p : row.probabilities) p /= sum;
    row.lse = most + std::log(sum);
    return row;
  }

  // The lse of all rows.
  template <typename Acc>
  std::vector<Acc> Lse() const {
    std::vector<Acc> lse;
    ForEachRow([&](int64_t entry, int64_t head, int64_t t) {
      lse.push_back(static_cast<Acc>(RowOf(entry, head, t).lse));
    });
    return lse;
  }

  // Compares results of attention with what they are.
  void Check(const std::vector<T>& out, const std::vector<float>& lse) const {
    if (IsWrong()) return;
    ForEachRow([&](int64_t entry, int64_t head, int64_t t) { CheckRow(out, lse, entry, head, t); });
  }

 private:
  static int64_t OfScores(int64_t size) { return Scoring::kExists ? size : 0; }
  std::pair<int32_t, int32_t> PositionOf(int64_t t, int64_t u) const {
    const bool moved = Scoring::kOffsets;
    return {static_cast<int32_t>(t) + (moved ? offsets_[0] : 0),
            static_cast<int32_t>(u) + (moved ? offsets_[1] : 0)};
  }
  void CheckRow(const std::vector<T>& out, const std::vector<float>& all_lse, int64_t entry,
                int64_t head, int64_t t) const {
    const Row row = RowOf(entry, head, t);
    const float lse = all_lse[NumberAt(entry, head, t)];
    if (!IsClose<float>(lse, row.lse, 20)) Fail("lse", head, t, lse, row.lse);
    for (int i = 0; i < kValueSize; ++i) {
      double sum = 0, most = 0;
      for (size_t k = 0; k < row.keys.size(); ++k) {
        const double weight = row.probabilities[k] * KeptOf(entry, head, t, row.keys[k]);
        const double part = weight * ToAccumulator(Value(entry, head, row.keys[k])[i]);
        sum += part;
        most += std::fabs(part);
      }
      // What a score is rounded by is a relative error of its probability.
      if (sizeof(T) == 4) most *= 1 + row.largest;
      const T got = out[VectorAt(entry, head, t) * kValueSize + i];
      if (!IsClose<T>(ToAccumulator(got), sum, most)) {
        Fail("attention", t, i, ToAccumulator(got), sum);
      }
    }
  }

  int64_t OwnKeys(int64_t entry) const { return key_entries_ > 1 ? entry : 0; }
  int64_t MaskOf(int64_t entry, int64_t head) const {
    const int64_t group = mask_groups_ > 1 ? head / size_.per_group : 0;
    const int64_t of_group = mask_per_group_ > 1 ? head % size_.per_group : 0;
    const int64_t own = mask_entries_ > 1 ? entry : 0;
    return (own * mask_groups_ + group) * mask_per_group_ + of_group;
  }

  void ChooseStored() {
    std::bernoulli_distribution few(0.09), half(0.5);
    const int64_t down = CeilDivide(size_.queries, kMaskCell);
    const int64_t across = CeilDivide(size_.keys, kMaskCell);
    const int64_t masks = mask_groups_ * mask_per_group_ * mask_entries_;
    for (int64_t mask = 0; mask < masks; ++mask) {
      std::vector<unsigned> states(static_cast<size_t>(down * across));
      for (unsigned& state : states) state = generator() % 3;
      for (int64_t t = 0; t < size_.queries; ++t) {
        for (int64_t u = 0; u < size_.keys; ++u) {
          const unsigned state = states[t / kMaskCell * across + u / kMaskCell];
          const bool no_row = t / kMaskTile == 1 && mask % 2 == 0;
          bool stored = false;
          switch (options_.mask) {
            case MaskKind::kAll:
              stored = true;
              break;
            case MaskKind::kCausal:
              stored = u <= t;
              break;
            case MaskKind::kScattered:
              stored = t != 3 && t != 70 && few(generator);
              break;
            case MaskKind::kCells:
              stored = !no_row && (state == 2 || (state == 1 && half(generator)));
              break;
            case MaskKind::kNothing:
              break;
          }
          stored_[(mask * size_.queries + t) * size_.keys + u] = stored;
        }
      }
    }
  }
  BlockMaskArrays MakeMask(bool transposed) {
    if (!transposed) ChooseStored();
    const int64_t masks = mask_groups_ * mask_per_group_ * mask_entries_;
    const auto stored = [&](int64_t mask, int64_t t, int64_t u) -> bool {
      return stored_[(mask * size_.queries + t) * size_.keys + u];
    };
    if (!transposed) return BlockMaskArrays(masks, size_.queries, size_.keys, stored);
    return BlockMaskArrays(masks, size_.keys, size_.queries,
                           [&](int64_t mask, int64_t u, int64_t t) { return stored(mask, t, u); });
  }

  AttentionSize size_;
  AttentionOptions options_;
  int64_t key_entries_, mask_groups_, mask_per_group_, mask_entries_;
  std::vector<T> query_, key_, value_;
  std::vector<char> stored_;
  BlockMaskArrays mask_, transposed_mask_;
  std::vector<float> heat_;
  std::vector<bfloat16> bias_;
  std::vector<float> table_;
  std::vector<int32_t> ids_;
  std::vector<float> tilt_;
  std::vector<uint32_t> seeds_;
  std::vector<float> rate_;
  std::vector<int32_t> offsets_ = {5, -3};
};

}  // namespace jaxsparse
