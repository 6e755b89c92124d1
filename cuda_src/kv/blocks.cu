// Blocks copied whole, in every slice (keys and values of every layer): inside the pool, and to and from staging.
//
// A thread owns one word of a block in one slice and treats the listed blocks one after another: copies of a list
// behave as if made in its order, with no synchronisation, whatever sources and targets they share.
// Launch: grid (ceil(words / 256), slices), block 256. Defines: WORD_BYTES, 16 or 4, a divisor of the block's bytes.
//   pool      [slices, num_blocks, words] of WORD_BYTES each; slice_words = num_blocks * words
//   pairs     int32 [count, 2], source and target; blocks int32 [count]
//   staging   [count, slices, words]: a block's slices side by side
#include "common/ptx.cuh"

#if WORD_BYTES == 16
using word = uint4;
#else
using word = u32;
#endif

struct Place {
  long long slice;
  int index;

  DEVICE Place(long long slice_words)
      : slice(blockIdx.y * slice_words), index(static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x)) {}
  DEVICE long long of_block(int block, int words) const { return slice + static_cast<long long>(block) * words + index; }
  DEVICE long long staged(int i, int words) const {
    return (static_cast<long long>(i) * gridDim.y + blockIdx.y) * words + index;
  }
};

extern "C" __global__ void __launch_bounds__(256)
copy_blocks(word* pool, const int* pairs, int count, int words, long long slice_words) {
  const Place place(slice_words);
  if (place.index >= words) return;
  for (int i = 0; i < count; ++i)
    pool[place.of_block(pairs[2 * i + 1], words)] = pool[place.of_block(pairs[2 * i], words)];
}

extern "C" __global__ void __launch_bounds__(256)
gather_blocks(const word* pool, const int* blocks, word* staging, int count, int words, long long slice_words) {
  const Place place(slice_words);
  if (place.index >= words) return;
  for (int i = 0; i < count; ++i) staging[place.staged(i, words)] = pool[place.of_block(blocks[i], words)];
}

extern "C" __global__ void __launch_bounds__(256)
scatter_blocks(word* pool, const int* blocks, const word* staging, int count, int words, long long slice_words) {
  const Place place(slice_words);
  if (place.index >= words) return;
  for (int i = 0; i < count; ++i) pool[place.of_block(blocks[i], words)] = staging[place.staged(i, words)];
}
