// In which order the entries of a sparse matrix are read: by threads that are served together, so
// that the columns of their entries lie in different banks of shared memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace jaxsparse {

struct LayoutEntry {
  int32_t column, value;
};

// What is left of a row to assign in one part: its entries by bank, each bank's taken from the end.
struct EntryPool {
  std::vector<LayoutEntry> entries;
  std::vector<int32_t> begin, end;
  int64_t padding = 0;
};

// One access of threads that are served together: to each an entry of its row, as many as possible
// of different banks.
class BankWavefront {
 public:
  explicit BankWavefront(int banks) : banks_(banks), thread_of_(banks), demand_(banks) {}

  const std::vector<LayoutEntry>& taken() const { return taken_; }
  const std::vector<int>& served() const { return served_; }  // entries by bank

  // Takes them from pools[pool_of[k]] for k < count; pool_of[k] < 0: none.
  void Assign(std::vector<EntryPool>* pools, const int* pool_of, int count) {
    pools_ = pools;
    pool_of_ = pool_of;
    // What is left for these threads, by bank: banks in demand are to go first.
    std::fill(demand_.begin(), demand_.end(), 0);
    for (int k = 0; k < count; ++k) {
      if (pool_of[k] < 0 || (k > 0 && pool_of[k] == pool_of[k - 1])) continue;
      for (int b = 0; b < banks_; ++b) demand_[b] += Left(k, b);
    }
    std::fill(thread_of_.begin(), thread_of_.end(), -1);
    bank_of_.assign(count, -1);
    for (int k = 0; k < count; ++k) {
      if (pool_of[k] < 0) continue;
      seen_ = 0;
      if (!TakeFree(k)) Rearrange(k);
    }
    taken_.assign(count, {-1, -1});
    served_.assign(banks_, 0);
    for (int k = 0; k < count; ++k) {
      if (bank_of_[k] >= 0) Take(k, bank_of_[k]);
    }
    for (int k = 0; k < count; ++k) {
      if (pool_of[k] >= 0 && bank_of_[k] < 0) TakeUsed(k);
    }
  }

 private:
  static constexpr int kOwnWeight = 8;  // of a row's own entries against its neighbours'

  int Left(int k, int bank) const {
    const EntryPool& pool = (*pools_)[pool_of_[k]];
    return pool.end[bank] - pool.begin[bank];
  }

  bool TakeFree(int k) {
    int best = -1, best_score = 0;
    for (int b = 0; b < banks_; ++b) {
      if (thread_of_[b] >= 0 || Left(k, b) == 0) continue;
      const int score = kOwnWeight * Left(k, b) + demand_[b];
      if (score > best_score) best = b, best_score = score;
    }
    if (best < 0) return false;
    thread_of_[best] = k;
    bank_of_[k] = best;
    return true;
  }

  // An augmenting path of the matching of threads and banks.
  bool Rearrange(int k) {
    for (int b = 0; b < banks_; ++b) {
      if ((seen_ >> b & 1) != 0 || Left(k, b) == 0) continue;
      seen_ |= 1u << b;
      if (thread_of_[b] >= 0 && !TakeFree(thread_of_[b]) && !Rearrange(thread_of_[b])) continue;
      thread_of_[b] = k;
      bank_of_[k] = b;
      return true;
    }
    return false;
  }

  void Take(int k, int bank) {
    EntryPool& pool = (*pools_)[pool_of_[k]];
    taken_[k] = pool.entries[--pool.end[bank]];
    ++served_[bank];
  }

  // Padding where the row has room for it, else the least used bank.
  void TakeUsed(int k) {
    EntryPool& pool = (*pools_)[pool_of_[k]];
    if (pool.padding > 0) {
      --pool.padding;
      return;
    }
    int best = -1;
    for (int b = 0; b < banks_; ++b) {
      if (Left(k, b) > 0 && (best < 0 || served_[b] < served_[best])) best = b;
    }
    if (best >= 0) Take(k, best);
  }

  const int banks_;
  std::vector<EntryPool>* pools_ = nullptr;
  const int* pool_of_ = nullptr;
  std::vector<int> thread_of_, bank_of_, demand_, served_;
  std::vector<LayoutEntry> taken_;
  uint32_t seen_ = 0;
};

}  // namespace jaxsparse
