// The draw of one token per row by the rule of headrace.testing.numpy_sampling, without sorting the vocabulary.
//
// | version                                                                  | registers sm_90 | H200, 64 x 128k, top-k + top-p |
// |--------------------------------------------------------------------------|-----------------|--------------------------------|
// | one block per row, 8-bit digits: 8 reads of a row in one launch, idle    | 36              |                                |
// |   multiprocessors below 132 rows, ties cut by logit only                 |                 |                                |
// | this: several blocks per row, 11-bit digits, a launch per digit          | see budget_cuda.json |                                |
//
// Order is (logit descending, id ascending), held in one 54-bit key, so top_k, top_p and the list of best tokens
// are each one cut in it: the largest key whose keys at or above it weigh what is wanted. A cut is found digit by
// digit from histograms; weights are integers, so the order of additions does not matter. Blocks of a row meet
// between launches only. Seed and position are read from device memory: a captured graph draws anew.
#include "primitives.cuh"

#ifndef VECTOR
#error "VECTOR (4: rows of logits are aligned to 16 bytes, else 1) specialises this file"
#endif

using U64 = unsigned long long;
constexpr int kThreads = 256, kBins = 2048, kBinsPerThread = kBins / kThreads, kIdBits = 22, kLevels = 5;
constexpr int kFloats = 6, kInts = 8;  // columns: headrace.backends.gpu.sampling_arguments
constexpr int kByCount = 0, kByMass = 1, kBest = 2;
constexpr float kLog2E = 1.4426950408889634f, kUnit = 1099511627776.0f;  // 2^40: the weight of the best token

struct Cut {   // what is known of a cut after some digits
  U64 prefix;  // digits found so far, in place; once all are found: the smallest key kept
  U64 above;   // weight of all keys above the prefix
  U64 wanted;
  U64 found;   // 1: no further digit is needed
};
struct Partial {
  double score;
  long long token;
};
struct Rows {  // the same for every kernel here
  const float *raw, *adjusted;  // [rows, vocab]; adjusted: of rows that have a mask, a bias or penalties
  const float* floats;
  const int* ints;
  Cut* cuts;        // [mode][kLevels + 1][rows]
  U64* histograms;  // [mode][kLevels][rows][kBins]
  float4* maxima;   // [rows][blocks of a row]: of raw, of adjusted, 1 where raw holds NaN
  int vocab, num_rows;
};

__device__ __forceinline__ int shift_of(int level) { return level == 0 ? 43 : level == 1 ? 32 : level == 2 ? 22 : level == 3 ? 11 : 0; }
__device__ __forceinline__ int width_of(int level) { return level == 2 ? 10 : 11; }

__device__ __forceinline__ U64 key_of(float x, int id) {
  const unsigned bits = __float_as_uint(x + 0.0f);  // -0 equals 0
  const unsigned ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<U64>(ordered) << kIdBits | static_cast<U64>((1 << kIdBits) - 1 - id);
}
__device__ __forceinline__ U64 weight_of(float s) { return static_cast<U64>(exp2f(s * kLog2E) * kUnit); }
__device__ __forceinline__ bool is_adjusted(const int* ints) { return ints[4] > ints[3] || ints[6] > ints[5] || ints[7] >= 0; }
__device__ __forceinline__ bool draws(const float* floats, const int* ints) { return ints[2] < 0 && floats[0] > 0.0f; }
__device__ __forceinline__ bool is_active(int mode, const float* floats, const int* ints, int vocab) {
  if (mode == kByCount) return draws(floats, ints) && ints[0] > 0;
  if (mode == kByMass) return draws(floats, ints) && floats[1] < 1.0f;
  return ints[1] > 0 && ints[1] < vocab;
}
__device__ __forceinline__ const float* row_of(const Rows& rows, int row, int mode) {
  const bool adjusted = mode != kBest && is_adjusted(rows.ints + row * kInts);
  return (adjusted ? rows.adjusted : rows.raw) + static_cast<size_t>(row) * rows.vocab;
}
__device__ __forceinline__ Cut* cut_at(const Rows& rows, int mode, int level, int row) { return rows.cuts + (static_cast<size_t>(mode) * (kLevels + 1) + level) * rows.num_rows + row; }
__device__ __forceinline__ U64* histogram_at(const Rows& rows, int mode, int level, int row) { return rows.histograms + ((static_cast<size_t>(mode) * kLevels + level) * rows.num_rows + row) * kBins; }

// Call f(id, x) for the tokens of this block's share of a row, four of one Philox counter to a thread at a time.
template <class F>
__device__ __forceinline__ void for_each_four(const float* row, int vocab, const F& f) {
  const int fours = (vocab + 3) / 4, share = (fours + gridDim.x - 1) / gridDim.x, first = blockIdx.x * share;
  const int last = min(fours, first + share);
  for (int four = first + threadIdx.x; four < last; four += kThreads) {
    float x[4];
#if VECTOR == 4
    const float4 all = reinterpret_cast<const float4*>(row)[four];
    x[0] = all.x, x[1] = all.y, x[2] = all.z, x[3] = all.w;
#else
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = 4 * four + i < vocab ? row[4 * four + i] : 0.0f;
#endif
    f(four, x, min(4, vocab - 4 * four));
  }
}

// The largest logit of a row and whether it holds NaN, from the shares of its blocks; all 32 lanes take part.
__device__ __forceinline__ float4 row_maxima(const Rows& rows, int row, int num_shares) {
  const int lane = threadIdx.x % 32;
  float4 m = rows.maxima[static_cast<size_t>(row) * num_shares + min(lane, num_shares - 1)];
  m.x = warp_max(m.x), m.y = warp_max(m.y), m.z = warp_max(m.z);
  return m;
}

// Philox4x32-10 (Salmon et al., SC 2011): the words of counter (four, position, 0, 0)
__device__ __forceinline__ void philox(unsigned four, unsigned position, U64 seed, unsigned (&words)[4]) {
  unsigned key_0 = static_cast<unsigned>(seed), key_1 = static_cast<unsigned>(seed >> 32), c0 = four, c1 = position, c2 = 0, c3 = 0;
#pragma unroll
  for (int i = 0; i < 10; i++) {
    const unsigned high_0 = __umulhi(0xD2511F53u, c0), low_0 = 0xD2511F53u * c0, high_1 = __umulhi(0xCD9E8D57u, c2), low_1 = 0xCD9E8D57u * c2;
    c0 = high_1 ^ c1 ^ key_0, c1 = low_1, c2 = high_0 ^ c3 ^ key_1, c3 = low_0;
    key_0 += 0x9E3779B9u, key_1 += 0xBB67AE85u;
  }
  words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

// grid: rows. Makes the adjusted copy of rows that have a mask, a bias or penalties.
extern "C" __global__ void __launch_bounds__(256)
adjust_rows(const float* __restrict__ raw, float* __restrict__ adjusted, const float* __restrict__ all_floats, const int* __restrict__ all_ints, const int* __restrict__ history_ids, const int* __restrict__ history_counts,
            const int* __restrict__ bias_ids, const float* __restrict__ bias_values, const unsigned* __restrict__ masks, int* __restrict__ adjust_failed, int vocab) {
  const int row = blockIdx.x;
  const float* floats = all_floats + row * kFloats;
  const int* ints = all_ints + row * kInts;
  if (!is_adjusted(ints)) return;
  SHARED_MEMORY(memory);
  float* shared = reinterpret_cast<float*>(memory);
  raw += static_cast<size_t>(row) * vocab, adjusted += static_cast<size_t>(row) * vocab;
  const unsigned* mask = ints[7] < 0 ? nullptr : masks + static_cast<size_t>(ints[7]) * ((vocab + 31) / 32);
  const float lowest = __uint_as_float(0xFF800000u);
  for (int i = threadIdx.x; i < vocab; i += kThreads) adjusted[i] = mask == nullptr || mask[i / 32] >> (i % 32) & 1u ? raw[i] : lowest;
#ifndef BUG_NO_BARRIER_BEFORE_BIAS
  __syncthreads();
#endif
  for (int i = ints[5] + threadIdx.x; i < ints[6]; i += kThreads) adjusted[bias_ids[i]] += bias_values[i];
  __syncthreads();
  float largest = lowest;
  for (int i = threadIdx.x; i < vocab; i += kThreads) largest = fmaxf(largest, adjusted[i]);
  largest = warp_max(largest);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = largest;
#ifndef BUG_NO_BARRIER_BEFORE_PENALTIES
  __syncthreads();
#endif
  for (int w = 0; w < kThreads / 32; w++) largest = fmaxf(largest, shared[w]);
  if (threadIdx.x == 0) adjust_failed[row] = !isfinite(largest);
  for (int i = ints[3] + threadIdx.x; i < ints[4]; i += kThreads) {
    float x = adjusted[history_ids[i]];
    x = x > 0.0f ? x / floats[5] : x * floats[5];
    x -= floats[4] * history_counts[i];
    adjusted[history_ids[i]] = history_counts[i] > 0 ? x - floats[3] : x;
  }
}

// grid: blocks of a row, rows
extern "C" __global__ void __launch_bounds__(256) row_statistics(Rows rows) {
  SHARED_MEMORY(memory);
  float4* shared = reinterpret_cast<float4*>(memory);
  const int row = blockIdx.y;
  const float lowest = __uint_as_float(0xFF800000u);
  float4 m = make_float4(lowest, lowest, 0.0f, 0.0f);
  for_each_four(row_of(rows, row, kBest), rows.vocab, [&](int, const float(&x)[4], int count) {
    for (int i = 0; i < count; i++) m.x = fmaxf(m.x, x[i]), m.z = isnan(x[i]) ? 1.0f : m.z;
  });
  m.y = m.x;
  if (is_adjusted(rows.ints + row * kInts)) {
    m.y = lowest;
    for_each_four(row_of(rows, row, kByCount), rows.vocab, [&](int, const float(&x)[4], int count) {
      for (int i = 0; i < count; i++) m.y = fmaxf(m.y, x[i]);
    });
  }
  m.x = warp_max(m.x), m.y = warp_max(m.y), m.z = warp_max(m.z);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = m;
#ifndef BUG_NO_BARRIER_IN_STATISTICS
  __syncthreads();
#endif
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kThreads / 32; w++) m.x = fmaxf(m.x, shared[w].x), m.y = fmaxf(m.y, shared[w].y), m.z = fmaxf(m.z, shared[w].z);
  rows.maxima[static_cast<size_t>(row) * gridDim.x + blockIdx.x] = m;
}

// Choose the digit of `level` from its histogram. Every thread of the block gets the same cut.
__device__ Cut choose_digit(const Rows& rows, int mode, int level, int row, char* memory) {
  U64* totals = reinterpret_cast<U64*>(memory);
  Cut* chosen = reinterpret_cast<Cut*>(memory + 8 * (kThreads / 32));
  Cut cut = *cut_at(rows, mode, level, row);
  if (cut.found) return cut;
  const U64* histogram = histogram_at(rows, mode, level, row);
  const int top = kBins - 1 - threadIdx.x * kBinsPerThread;  // bins from the best down
  U64 mine = 0;
  for (int i = 0; i < kBinsPerThread; i++) mine += histogram[top - i];
  U64 before = mine;
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const U64 other = __shfl_up_sync(0xFFFFFFFFu, before, lanes);
    if (static_cast<int>(threadIdx.x % 32) >= lanes) before += other;
  }
  if (threadIdx.x % 32 == 31) totals[threadIdx.x / 32] = before;
#ifndef BUG_NO_BARRIER_IN_SCAN
  __syncthreads();
#endif
  before -= mine;
  U64 total = 0;
  for (int w = 0; w < kThreads / 32; w++) {
    if (w == static_cast<int>(threadIdx.x / 32)) before += total;
    total += totals[w];
  }
  if (mode == kByMass && level == 0) {  // mass before a kept token is below top_p of all mass
    const double part = ceil(static_cast<double>(rows.floats[row * kFloats + 1]) * static_cast<double>(total));
    cut.wanted = min(max(static_cast<U64>(part), static_cast<U64>(1)), total);
  }
  before += cut.above;
  if (before < cut.wanted && cut.wanted <= before + mine) {
    int bin = top;
    while (before + histogram[bin] < cut.wanted) before += histogram[bin--];
    cut.prefix |= static_cast<U64>(bin) << shift_of(level);
    cut.found = before + histogram[bin] == cut.wanted;
    cut.above = before;
    *chosen = cut;
  }
  __syncthreads();
  return *chosen;
}

// grid: blocks of a row (1 at level kLevels), rows. Level 0 begins a cut; each next one chooses a digit and counts the one
// after; level kLevels chooses the last.
extern "C" __global__ void __launch_bounds__(256) cut_rows(Rows rows, int mode, int level, int num_shares) {
  SHARED_MEMORY(memory);
  const int row = blockIdx.y;
  const float* floats = rows.floats + row * kFloats;
  const int* ints = rows.ints + row * kInts;
  const float4 maxima = row_maxima(rows, row, num_shares);
  if (!is_active(mode, floats, ints, rows.vocab) || maxima.z != 0.0f || !isfinite(mode == kBest ? maxima.x : maxima.y)) return;
  Cut cut = {0, 0, static_cast<U64>(mode == kByCount ? ints[0] : mode == kBest ? ints[1] : 0), 0};
  if (level > 0) cut = choose_digit(rows, mode, level - 1, row, memory);
  if (blockIdx.x == 0 && threadIdx.x == 0) *cut_at(rows, mode, level, row) = cut;
  if (level == kLevels || cut.found) return;
  U64* counts = reinterpret_cast<U64*>(memory + 128);
  for (int i = threadIdx.x; i < kBins; i += kThreads) counts[i] = 0;
#ifndef BUG_NO_BARRIER_BEFORE_COUNTS
  __syncthreads();
#endif
  const U64 floor = mode == kByMass && is_active(kByCount, floats, ints, rows.vocab) ? cut_at(rows, kByCount, kLevels, row)->prefix : 0;
  const int shift = shift_of(level), above = shift + width_of(level);
  for_each_four(row_of(rows, row, mode), rows.vocab, [&](int four, const float(&x)[4], int count) {
    for (int i = 0; i < count; i++) {
      const U64 key = key_of(x[i], 4 * four + i);
      if (key < floor || key >> above != cut.prefix >> above) continue;
      const U64 weight = mode == kByMass ? weight_of((x[i] - maxima.y) / floats[0]) : 1;
      if (weight != 0) atomicAdd(counts + (key >> shift & ((1u << width_of(level)) - 1)), weight);
    }
  });
#ifndef BUG_NO_BARRIER_AFTER_COUNTS
  __syncthreads();
#endif
  U64* histogram = histogram_at(rows, mode, level, row);
  for (int i = threadIdx.x; i < kBins; i += kThreads)
    if (counts[i] != 0) atomicAdd(histogram + i, counts[i]);
}

__device__ __forceinline__ void keep_better(Partial& best, const Partial& other) {
  if (other.score > best.score || (other.score == best.score && other.token < best.token)) best = other;
}
__device__ __forceinline__ Partial warp_best(Partial best) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    Partial other;
    other.score = __shfl_xor_sync(0xFFFFFFFFu, best.score, lanes);
    other.token = __shfl_xor_sync(0xFFFFFFFFu, best.token, lanes);
    keep_better(best, other);
  }
  return best;
}

// The best of this thread's tokens: by logit where greedy, else by s + noise among those that the filters keep.
__device__ __forceinline__ Partial best_token(const Rows& rows, int row, float largest, const U64 seed, const unsigned position) {
  const float* floats = rows.floats + row * kFloats;
  const int* ints = rows.ints + row * kInts;
  const bool is_greedy = !draws(floats, ints);
  Partial best = {-__longlong_as_double(0x7FF0000000000000ll), 0x7FFFFFFFFFFFFFFFll};
  U64 floor = 0;
  for (int mode = kByCount; mode <= kByMass; mode++)
    if (is_active(mode, floats, ints, rows.vocab)) floor = max(floor, cut_at(rows, mode, kLevels, row)->prefix);
  const double temperature = floats[0], lowest = floats[2] > 0.0f ? log(static_cast<double>(floats[2])) : best.score;
  for_each_four(row_of(rows, row, kByCount), rows.vocab, [&](int four, const float(&x)[4], int count) {
    if (is_greedy) {
      for (int i = 0; i < count; i++) keep_better(best, Partial{x[i], 4 * four + i});
      return;
    }
    const float near = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
    if ((near - largest) / floats[0] + 16.7f < static_cast<float>(best.score)) return;  // no noise is above 16.64
    unsigned words[4];
    philox(four, position, seed, words);
    for (int i = 0; i < count; i++) {
      const float u = ((words[i] >> 9) + 0.5f) * 1.1920928955078125e-7f;  // exact
      // single precision decides what cannot win
      if ((x[i] - largest) / floats[0] - logf(-logf(u)) + 0.01f < static_cast<float>(best.score)) continue;
      const double s = (static_cast<double>(x[i]) - static_cast<double>(largest)) / temperature;
      if (key_of(x[i], 4 * four + i) < floor || s < lowest) continue;
      keep_better(best, Partial{s - log(-log(static_cast<double>(u))), 4 * four + i});
    }
  });
  return best;
}

// grid: blocks of a row, rows. sums [rows]: exponentials of the untouched row; listed [rows, most]: keys of the best.
extern "C" __global__ void __launch_bounds__(256)
draw_shares(Rows rows, const U64* __restrict__ seeds, const long long* __restrict__ positions, Partial* __restrict__ partials, U64* sums, U64* listed, int* num_listed, int most) {
  SHARED_MEMORY(memory);
  Partial* shared = reinterpret_cast<Partial*>(memory);
  const int row = blockIdx.y;
  const int* ints = rows.ints + row * kInts;
  const float4 maxima = row_maxima(rows, row, gridDim.x);
  if (maxima.z != 0.0f || !isfinite(maxima.x)) return;
  if (ints[1] >= 0) {
    U64 sum = 0;
    const U64 floor = is_active(kBest, rows.floats + row * kFloats, ints, rows.vocab) ? cut_at(rows, kBest, kLevels, row)->prefix : 0;
    for_each_four(row_of(rows, row, kBest), rows.vocab, [&](int four, const float(&x)[4], int count) {
      for (int i = 0; i < count; i++) {
        sum += weight_of(x[i] - maxima.x);
        const U64 key = key_of(x[i], 4 * four + i);
        if (ints[1] > 0 && key >= floor) listed[static_cast<size_t>(row) * most + atomicAdd(num_listed + row, 1)] = key;
      }
    });
    atomicAdd(sums + row, sum);
  }
  if (ints[2] >= 0 || !isfinite(maxima.y)) return;
  const Partial best = warp_best(best_token(rows, row, maxima.y, seeds[row], static_cast<unsigned>(positions[row])));
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = best;
#ifndef BUG_NO_BARRIER_IN_DRAW
  __syncthreads();
#endif
  if (threadIdx.x != 0) return;
  Partial of_block = shared[0];
  for (int w = 1; w < kThreads / 32; w++) keep_better(of_block, shared[w]);
  partials[static_cast<size_t>(row) * gridDim.x + blockIdx.x] = of_block;
}

// grid: rows; one warp
extern "C" __global__ void __launch_bounds__(32)
finish_rows(Rows rows, const Partial* __restrict__ partials, const U64* __restrict__ sums, const U64* __restrict__ listed, const int* __restrict__ adjust_failed, int* __restrict__ token_ids, int* __restrict__ failed,
            float* __restrict__ logprobs, int* __restrict__ top_token_ids, float* __restrict__ top_logprobs, int most, int num_shares) {
  const int row = blockIdx.x, lane = threadIdx.x;
  const int* ints = rows.ints + row * kInts;
  const float4 maxima = row_maxima(rows, row, num_shares);
  const bool is_scored = ints[2] >= 0, has_failed = maxima.z != 0.0f || !isfinite(maxima.x) || (!is_scored && is_adjusted(ints) && adjust_failed[row] != 0);
  if (lane == 0) failed[row] = has_failed, token_ids[row] = 0;
  if (has_failed) return;
  long long token = ints[2];
  if (!is_scored) token = warp_best(partials[static_cast<size_t>(row) * num_shares + min(lane, num_shares - 1)]).token;
  if (lane == 0) token_ids[row] = static_cast<int>(token);
  if (ints[1] < 0) return;
  const double largest = maxima.x, rest = log(static_cast<double>(sums[row]) / kUnit);
  if (lane == 0) logprobs[row] = static_cast<float>(static_cast<double>(rows.raw[static_cast<size_t>(row) * rows.vocab + token]) - largest - rest);
  listed += static_cast<size_t>(row) * most;
  for (int i = lane; i < ints[1]; i += 32) {  // a token's place is the number of better ones
    int place = 0;
    for (int j = 0; j < ints[1]; j++) place += listed[j] > listed[i];
    const int id = (1 << kIdBits) - 1 - static_cast<int>(listed[i] & ((1 << kIdBits) - 1));
    top_token_ids[static_cast<size_t>(row) * most + place] = id;
    top_logprobs[static_cast<size_t>(row) * most + place] = static_cast<float>(static_cast<double>(rows.raw[static_cast<size_t>(row) * rows.vocab + id]) - largest - rest);
  }
}
