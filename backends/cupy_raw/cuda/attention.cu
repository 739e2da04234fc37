// Paged attention of one query token per piece on CUDA cores, and the merge of all pieces.
//
// | version                                                      | registers sm_90 | H200, 32 x 4k, bf16 |
// |--------------------------------------------------------------|-----------------|---------------------|
// | rows straight to registers, 4 tokens ahead (D 128, group 1)  | 48              |                     |
// |   asked for 8 loads in flight; ptxas sank them to 3          |                 |                     |
// | this: each thread copies its own 16 bytes to shared memory,  | see budget_cuda.json |                     |
// |   kStages - 1 tokens ahead; no barrier in the loop, because  |                 |                     |
// |   no thread reads what another copied                        |                 |                     |
//
// One block: one KV head of one piece (headrace.backends.gpu.work_list), kHeads of its query heads. kLanes threads
// share a row, kRowsAtOnce rows go through the block at a time. Scores are kept in base 2. Causality and
// window are in the piece's row range already, as a piece holds one token.
#include "attention.cuh"

#ifndef HEAD_DIM
#error "HEAD_DIM, GROUP, HEADS, BLOCK_SIZE, ACTIVATION, STORED, SOFTCAP, BIAS specialise this file"
#endif

using Activation = Format<ACTIVATION>;
using Stored = Format<STORED>;

constexpr int kHeadDim = HEAD_DIM, kHeads = HEADS, kThreads = 128, kStages = 4, kWarps = kThreads / 32;
constexpr int kPerVector = Stored::kPerVector, kVectorsPerRow = kHeadDim / kPerVector;
__device__ constexpr int power_of_two(int n) { return n <= 1 ? 1 : 2 * power_of_two((n + 1) / 2); }
constexpr int kLanes = power_of_two(kVectorsPerRow) < 32 ? power_of_two(kVectorsPerRow) : 32;
constexpr int kVectors = (kVectorsPerRow + kLanes - 1) / kLanes;  // of one thread
constexpr int kElements = kVectors * kPerVector;
constexpr int kRowsAtOnce = kThreads / kLanes;
constexpr bool kScaled = Stored::kLargest > 0.0f;
static_assert(kHeadDim % kPerVector == 0, "a row is whole 16-byte vectors");

// Of a block: stages of 16-byte vectors [stage][key or value][vector][thread], later the merge's rows [warp][head][dim], maxima and sums.
struct Online {
  float row[kHeads][kElements], largest[kHeads], sum[kHeads];
};

struct Rows {  // what a thread copies from
  const typename Stored::Type *keys, *values;
  const float *key_scale, *value_scale, *bias;
  const int* table;
  int num_kv_heads, kv_head, first, last, lane, place;

  __device__ __forceinline__ int row_of(int step) const { return min(first + step * kRowsAtOnce + place, last - 1); }
  __device__ __forceinline__ int block_of(int step) const { return table[row_of(step) / BLOCK_SIZE]; }
  // index of (row, head) in a plane [slots, heads]
  __device__ __forceinline__ size_t line(int block, int step) const {
    return (static_cast<size_t>(block) * BLOCK_SIZE + row_of(step) % BLOCK_SIZE) * num_kv_heads + kv_head;
  }
};

__device__ __forceinline__ void copy_rows(uint4* stage, const Rows& rows, size_t line) {
#pragma unroll
  for (int v = 0; v < kVectors; v++) {
    const int vector = v * kLanes + rows.lane;
    if (vector < kVectorsPerRow) {
      const size_t element = line * kHeadDim + vector * kPerVector;
      copy_async16(stage + v * kThreads, rows.keys + element);
      copy_async16(stage + (kVectors + v) * kThreads, rows.values + element);
    }
  }
}

template <int kHeadsNow>
__device__ __forceinline__ void add_row(Online& online, const float (&query)[kHeads][kElements], const uint4* stage, int lane, bool valid, float key_scale, float value_scale, float bias, float softcap) {
  float score[kHeadsNow] = {};
#pragma unroll
  for (int v = 0; v < kVectors; v++) {
    if (v * kLanes + lane >= kVectorsPerRow) continue;
    float key[kPerVector];
    Stored::unpack(stage[v * kThreads], key);
#pragma unroll
    for (int h = 0; h < kHeadsNow; h++)
#pragma unroll
      for (int e = 0; e < kPerVector; e++) score[h] = fmaf(query[h][v * kPerVector + e], key[e], score[h]);
  }
#pragma unroll
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2)
#pragma unroll
    for (int h = 0; h < kHeadsNow; h++) score[h] += __shfl_xor_sync(0xFFFFFFFFu, score[h], lanes);
  float weight[kHeadsNow];
#pragma unroll
  for (int h = 0; h < kHeadsNow; h++) {
    float s = kScaled ? score[h] * key_scale : score[h];
#if SOFTCAP
    s = softcap * kLog2E * tanhf(s / softcap);
#endif
#if BIAS
    s = fmaf(bias, kLog2E, s);
#endif
    const float largest = valid ? fmaxf(online.largest[h], s) : online.largest[h];
    if (largest != online.largest[h]) {  // rarely, once the largest score was met
      const float shrink = exp2_fast(online.largest[h] - largest);
      online.largest[h] = largest;
      online.sum[h] *= shrink;
#pragma unroll
      for (int e = 0; e < kElements; e++) online.row[h][e] *= shrink;
    }
    weight[h] = valid ? exp2_fast(s - largest) : 0.0f;
    online.sum[h] += weight[h];
    if (kScaled) weight[h] *= value_scale;
  }
#pragma unroll
  for (int v = 0; v < kVectors; v++) {
    if (v * kLanes + lane >= kVectorsPerRow) continue;
    float value[kPerVector];
    Stored::unpack(stage[(kVectors + v) * kThreads], value);
#pragma unroll
    for (int h = 0; h < kHeadsNow; h++)
#pragma unroll
      for (int e = 0; e < kPerVector; e++) online.row[h][v * kPerVector + e] = fmaf(weight[h], value[e], online.row[h][v * kPerVector + e]);
  }
}

// Add up the kRowsAtOnce / kWarps threads of a warp that hold the same elements.
__device__ __forceinline__ void merge_in_warp(Online& online) {
#pragma unroll
  for (int lanes = kLanes; lanes < 32; lanes *= 2)
#pragma unroll
    for (int h = 0; h < kHeads; h++) {
      const float other = __shfl_xor_sync(0xFFFFFFFFu, online.largest[h], lanes), largest = fmaxf(online.largest[h], other);
      const float mine = exp2_fast(online.largest[h] - largest), theirs = exp2_fast(other - largest);
      online.largest[h] = largest;
      online.sum[h] = online.sum[h] * mine + __shfl_xor_sync(0xFFFFFFFFu, online.sum[h], lanes) * theirs;
#pragma unroll
      for (int e = 0; e < kElements; e++) online.row[h][e] = online.row[h][e] * mine + __shfl_xor_sync(0xFFFFFFFFu, online.row[h][e], lanes) * theirs;
    }
}

__device__ __forceinline__ void merge_warps(const Online& online, float* shared, int lane, float* partial_rows, float2* partial_sums, size_t first_row, int num_heads) {
  float *largest = shared + kWarps * kHeads * kHeadDim, *sums = largest + kWarps * kHeads;
  const int warp = threadIdx.x / 32;
#ifndef BUG_NO_BARRIER_BEFORE_MERGE
  __syncthreads();  // the rows are written over the stages
#endif
  if (threadIdx.x % 32 < kLanes) {
#pragma unroll
    for (int h = 0; h < kHeads; h++) {
      if (lane == 0) largest[warp * kHeads + h] = online.largest[h], sums[warp * kHeads + h] = online.sum[h];
#pragma unroll
      for (int e = 0; e < kElements; e += 4) {
        const int vector = e / kPerVector * kLanes + lane;
        if (vector < kVectorsPerRow)
          *reinterpret_cast<float4*>(shared + (warp * kHeads + h) * kHeadDim + vector * kPerVector + e % kPerVector) = make_float4(online.row[h][e], online.row[h][e + 1], online.row[h][e + 2], online.row[h][e + 3]);
      }
    }
  }
#ifndef BUG_NO_BARRIER_IN_MERGE
  __syncthreads();
#endif
  add_up_warps<kHeadDim, kWarps, kHeads>(shared, partial_rows, partial_sums, first_row, num_heads);
}

// grid: pieces, KV heads, GROUP / kHeads rounded up
extern "C" __global__ void __launch_bounds__(128)
attend_rows(const typename Activation::Type* __restrict__ q, long long q_stride, const typename Stored::Type* __restrict__ keys, const typename Stored::Type* __restrict__ values,
            const float* __restrict__ key_scale, const float* __restrict__ value_scale, const float* __restrict__ bias, const int* __restrict__ block_table, int table_width,
            const int* __restrict__ pieces, const int* __restrict__ counts, float* __restrict__ partial_rows, float2* __restrict__ partial_sums, float scale, float softcap) {
#ifndef BUG_NO_BOUND
  if (static_cast<int>(blockIdx.x) >= counts[0]) return;
#endif
  SHARED_MEMORY(memory);
  const int* piece = pieces + blockIdx.x * 8;
  const int kv_head = blockIdx.y, num_kv_heads = gridDim.y, first_head = blockIdx.z * kHeads, num_heads = min(kHeads, GROUP - first_head);
  const int lane = threadIdx.x % kLanes, place = threadIdx.x / kLanes;
  const Rows rows{keys, values, key_scale, value_scale, bias, block_table + static_cast<size_t>(piece[0]) * table_width, num_kv_heads, kv_head, piece[4], piece[5], lane, place};
  Online online;
  float query[kHeads][kElements];
#if SOFTCAP
  const float factor = scale;
#else
  const float factor = scale * kLog2E;
#endif
#pragma unroll
  for (int h = 0; h < kHeads; h++) {
    online.largest[h] = kLowest, online.sum[h] = 0.0f;
    const typename Activation::Type* from = q + piece[1] * q_stride + (kv_head * GROUP + min(first_head + h, GROUP - 1)) * kHeadDim;
#pragma unroll
    for (int e = 0; e < kElements; e++) {
      const int element = (e / kPerVector * kLanes + lane) * kPerVector + e % kPerVector;
      online.row[h][e] = 0.0f;
      query[h][e] = element < kHeadDim ? Activation::load(from + element) * factor : 0.0f;
    }
  }
  const int num_steps = (rows.last - rows.first + kRowsAtOnce - 1) / kRowsAtOnce;
  uint4* stages = reinterpret_cast<uint4*>(memory) + threadIdx.x;
  constexpr int kStage = 2 * kVectors * kThreads;
  int next_block = num_steps > 0 ? rows.block_of(0) : 0;  // table entries are read one step before the rows
#pragma unroll
  for (int s = 0; s < kStages - 1; s++) {
    if (s < num_steps) {
      copy_rows(stages + s * kStage, rows, rows.line(next_block, s));
      next_block = rows.block_of(s + 1);
    }
    copy_async_commit();
  }
  for (int step = 0; step < num_steps; step++) {  // as many steps for every thread: shuffles stay whole
    const int ahead = step + kStages - 1;
    if (ahead < num_steps) {
      copy_rows(stages + ahead % kStages * kStage, rows, rows.line(next_block, ahead));
      next_block = rows.block_of(ahead + 1);
    }
    copy_async_commit();
#ifdef BUG_SHORT_WAIT
    copy_async_wait<kStages>();
#else
    copy_async_wait<kStages - 1>();
#endif
    float key_factor = 1.0f, value_factor = 1.0f, addend = 0.0f;
    if (kScaled || BIAS) {
      const size_t line = rows.line(rows.block_of(step), step);
      if (kScaled) key_factor = key_scale[line], value_factor = value_scale[line];
#if BIAS
      addend = bias[line];
#endif
    }
    const bool valid = rows.first + step * kRowsAtOnce + place < rows.last;
    add_row<kHeads>(online, query, stages + step % kStages * kStage, lane, valid, key_factor, value_factor, addend, softcap);
  }
  merge_in_warp(online);
  const size_t first_row = (static_cast<size_t>(piece[6]) * num_kv_heads + kv_head) * GROUP + first_head;
  merge_warps(online, reinterpret_cast<float*>(memory), lane, partial_rows, partial_sums, first_row, num_heads);
}

// grid: planned tokens, query heads; one thread per element of the head
extern "C" __global__ void __launch_bounds__(256)
merge_pieces(const float* __restrict__ partial_rows, const float2* __restrict__ partial_sums, const int* __restrict__ merges, const int* __restrict__ counts,
             typename Activation::Type* __restrict__ out, long long out_stride, int tile_rows) {
  if (static_cast<int>(blockIdx.x) >= counts[1] || static_cast<int>(threadIdx.x) >= kHeadDim) return;
  const int* merge = merges + blockIdx.x * 4;
  const int head = blockIdx.y, num_kv_heads = gridDim.y / GROUP;
  float top = kLowest, sum = 0.0f, row = 0.0f;
  for (int p = 0; p < merge[2]; p++) {
    const size_t index = (static_cast<size_t>(merge[1] + p) * num_kv_heads + head / GROUP) * tile_rows + merge[3] * GROUP + head % GROUP;
    const float2 part = partial_sums[index];
    const float largest = fmaxf(top, part.x), shrink = exp2_fast(top - largest), factor = exp2_fast(part.x - largest);
    top = largest;
    sum = sum * shrink + part.y * factor;
    row = row * shrink + partial_rows[index * kHeadDim + threadIdx.x] * factor;
  }
  // a token that sees nothing gives zeros; NaN stays NaN
  out[merge[0] * out_stride + head * kHeadDim + threadIdx.x] = Activation::round(sum == 0.0f ? 0.0f : row / sum);
}
