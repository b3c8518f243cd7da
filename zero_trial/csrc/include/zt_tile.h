// Flat tensors in tiles: how a grid walks over one or many of them, and how four neighbouring elements are read and written.
//
// A tile is 256 threads x 2 x 4 elements. Blocks take contiguous runs of tiles, so a block finds its first tensor once and then
// only moves on. Where all pointers allow it, a full tile is read and written 16 bytes (fp32) or 8 bytes (16-bit) per thread and
// access; all loads of a tile stand before its first use. Tensors that all stand at the same place among four elements, as views
// of flat buffers at one offset do, have a head of up to three elements before their first tile. Heads, tails, and tensors that
// stand at different places go element by element.
#ifndef ZT_TILE_H
#define ZT_TILE_H

#include "zt_common.h"

typedef long long zt_i64;

enum { kThreads = 256, kVector = 4, kUnroll = 2, kTile = kThreads * kVector * kUnroll };
enum { kStoredNone = -1, kStoredFloat32 = 0, kStoredBFloat16 = 1, kStoredFloat16 = 2 };

// One flat tensor with what belongs to it. `tile` is the number of its first tile in the launch; `group` whose scalars it takes.
struct ZtPiece {
  void* p;
  const void* g;
  void* a;
  void* b;
  void* out;
  zt_i64 n;
  zt_i64 tile;
  zt_i64 group;
};

// Stands before every access to a tensor. The compiler learns that it is in global memory, which a pointer out of a table does not
// say (LDG instead of LD); the emulator looks at address and alignment.
#if defined(__CUDACC__)
#define ZT_ACCESS(pointer, bytes, writes) __builtin_assume(__isGlobal(pointer))
#elif !defined(ZT_ACCESS)
#define ZT_ACCESS(pointer, bytes, writes)
#endif

#if defined(__CUDACC__)
#define ZT_UNROLL _Pragma("unroll")
#else
#define ZT_UNROLL
struct float4 {
  float x, y, z, w;
};
struct uint2 {
  zt_u32 x, y;
};
struct uint4 {
  zt_u32 x, y, z, w;
};
#endif

template <int TYPE>
struct ZtStored;  // how a float is stored

template <>
struct ZtStored<kStoredFloat32> {
  static const int kBytes = 4;
  static const int kPer16 = 4;  // elements in 16 bytes
  static ZT_METHOD float load(const void* base, zt_i64 i) {
    const float* at = (const float*)base + i;
    ZT_ACCESS(at, 4, false);
    return *at;
  }
  static ZT_METHOD void store(void* base, zt_i64 i, float x) {
    float* at = (float*)base + i;
    ZT_ACCESS(at, 4, true);
    *at = x;
  }
  static ZT_METHOD void load4(const void* base, zt_i64 i, float* x) {
    const float4* at = (const float4*)((const float*)base + i);
    ZT_ACCESS(at, 16, false);
    const float4 four = *at;
    x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
  }
  static ZT_METHOD void load16(const void* base, zt_i64 i, float* x) { load4(base, i, x); }
  static ZT_METHOD void store4(void* base, zt_i64 i, const float* x) {
    float4* at = (float4*)((float*)base + i);
    ZT_ACCESS(at, 16, true);
    float4 four;
    four.x = x[0], four.y = x[1], four.z = x[2], four.w = x[3];
    *at = four;
  }
};

template <int TYPE>
ZT_FN float zt_widen(zt_u16 h) {
  return TYPE == kStoredBFloat16 ? zt_from_bf16(h) : zt_from_fp16(h);
}
template <int TYPE>
ZT_FN zt_u16 zt_narrow(float x) {
  return TYPE == kStoredBFloat16 ? zt_to_bf16(x) : zt_to_fp16(x);
}

template <int TYPE>
struct ZtStored {  // 16 bits
  static const int kBytes = 2;
  static const int kPer16 = 8;
  static ZT_METHOD float load(const void* base, zt_i64 i) {
    const zt_u16* at = (const zt_u16*)base + i;
    ZT_ACCESS(at, 2, false);
    return zt_widen<TYPE>(*at);
  }
  static ZT_METHOD void store(void* base, zt_i64 i, float x) {
    zt_u16* at = (zt_u16*)base + i;
    ZT_ACCESS(at, 2, true);
    *at = zt_narrow<TYPE>(x);
  }
  static ZT_METHOD void load4(const void* base, zt_i64 i, float* x) {
    const uint2* at = (const uint2*)((const zt_u16*)base + i);
    ZT_ACCESS(at, 8, false);
    const uint2 four = *at;
    x[0] = zt_widen<TYPE>((zt_u16)four.x), x[1] = zt_widen<TYPE>((zt_u16)(four.x >> 16));
    x[2] = zt_widen<TYPE>((zt_u16)four.y), x[3] = zt_widen<TYPE>((zt_u16)(four.y >> 16));
  }
  static ZT_METHOD void load16(const void* base, zt_i64 i, float* x) {
    const uint4* at = (const uint4*)((const zt_u16*)base + i);
    ZT_ACCESS(at, 16, false);
    const uint4 eight = *at;
    const zt_u32 pairs[4] = {eight.x, eight.y, eight.z, eight.w};
    ZT_UNROLL
    for (int k = 0; k < 4; ++k)
      x[2 * k] = zt_widen<TYPE>((zt_u16)pairs[k]), x[2 * k + 1] = zt_widen<TYPE>((zt_u16)(pairs[k] >> 16));
  }
  static ZT_METHOD void store4(void* base, zt_i64 i, const float* x) {
    uint2* at = (uint2*)((zt_u16*)base + i);
    ZT_ACCESS(at, 8, true);
    uint2 four;
    four.x = (zt_u32)zt_narrow<TYPE>(x[0]) | ((zt_u32)zt_narrow<TYPE>(x[1]) << 16);
    four.y = (zt_u32)zt_narrow<TYPE>(x[2]) | ((zt_u32)zt_narrow<TYPE>(x[3]) << 16);
    *at = four;
  }
};

// The absent output.
template <>
struct ZtStored<kStoredNone> {
  static const int kBytes = 1;
  static ZT_METHOD void store(void*, zt_i64, float) {}
  static ZT_METHOD void store4(void*, zt_i64, const float*) {}
};

// Whether four elements from any multiple of four on may be accessed at once.
template <int TYPE>
ZT_FN bool zt_aligned(const void* base) {
  return ((zt_i64)base & (ZtStored<TYPE>::kBytes * kVector - 1)) == 0;
}

// How many elements stand before the first that is aligned as zt_aligned says: 0 to 3.
template <int TYPE>
ZT_FN int zt_head(const void* base) {
  return (int)((0 - (unsigned long long)base / ZtStored<TYPE>::kBytes) & (kVector - 1));
}

ZT_FN zt_i64 zt_least(zt_i64 a, zt_i64 b) { return a < b ? a : b; }

ZT_FN zt_i64 zt_tiles(zt_i64 n) { return (n + kTile - 1) / kTile; }

// Block `block` of `blocks` takes the tiles [zt_share(block), zt_share(block + 1)). Tiles are counted in 31 bits where registers are
// short: that many would be 16 TB.
ZT_FN zt_i64 zt_share(zt_i64 tiles, zt_i64 block, zt_i64 blocks) {
  return tiles / blocks * block + zt_least(block, tiles % blocks);
}

// The number of the piece that a tile belongs to; pieces are in the order of their tiles and none is empty.
ZT_FN zt_i64 zt_piece_of(const ZtPiece* pieces, zt_i64 count, zt_i64 tile) {
  zt_i64 low = 0, high = count;
  while (high - low > 1) {
    const zt_i64 middle = (low + high) / 2;
    ZT_ACCESS(&pieces[middle].tile, 8, false);
    if (pieces[middle].tile <= tile)
      low = middle;
    else
      high = middle;
  }
  return low;
}

// Which four elements of a tile a thread takes in round `u`.
ZT_FN zt_i64 zt_slot(int u, int thread) { return ((zt_i64)u * kThreads + thread) * kVector; }

#endif
