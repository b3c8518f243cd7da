// Optimizer states in fewer bits: bfloat16, and 8-bit codes in blocks of 32 with a scale. ops/states.py says the same in torch.
//
// Values are wide while a step computes and are rounded when they are stored, up or down at random, so that what is lost has mean 0:
// with beta2 = 0.999 a step changes v by less than half the distance of two bfloat16 numbers, and rounding to nearest would keep the
// old value for ever. The noise is a hash of a tensor's key, which is another in every step, and of the element's place in its tensor:
// the same bits on every device, however tensors are cut over ranks, and after a resume.
//
//   bf16     16 of the hash's bits are added below the last bit that is kept (the lower half for the first state, the upper for the second)
//   8 bits   a block is 32 neighbours in a tensor, which no shard cuts; its scale is its largest magnitude, rounded up to bfloat16.
//            Codes are spaced by a power, densest near 0 (Dettmers et al. 2022 say why codes should be; Xi et al. 2024 do it with powers):
//            signed states are  scale (k / 127) |k / 127|,  others, which are squares,  scale (k / 255)^4.
//            A value above 0 never becomes 0: m / (sqrt(v) + eps) would explode. A block whose largest magnitude is not finite is NaN,
//            one whose largest is subnormal is 0.
#ifndef ZT_STATES_H
#define ZT_STATES_H

#include "zt_common.h"

typedef unsigned char zt_u8;

enum { kStateFloat32 = 0, kStateBFloat16 = 1, kState8Bits = 4 };
enum { kBlock = 32 };  // elements with a common scale

// Thirty-two bits for one element (lowbias32 of Wellons 2018).
ZT_FN zt_u32 zt_noise(zt_u32 key, zt_u32 place) {
  zt_u32 h = key + place;
  h = (h ^ (h >> 16)) * 0x7feb352du;
  h = (h ^ (h >> 15)) * 0x846ca68bu;
  return h ^ (h >> 16);
}

ZT_FN zt_u16 zt_to_bf16_at_random(float x, zt_u32 noise16) {
  const zt_u32 u = zt_bits(x);
  return (zt_u16)((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : (u + noise16) >> 16);
}

// What the largest magnitude of a block makes of it: `largest` are the bits of a float without its sign, which order as floats do.
ZT_FN zt_u16 zt_scale_of(zt_u32 largest) {
  const zt_u32 up = (largest + 0xffffu) >> 16;
  return (zt_u16)(largest < 0x00800000u ? 0u : up >= 0x7f80u ? 0x7fc0u : up);
}

ZT_FN float zt_inverse_scale(zt_u16 scale) { return scale ? zt_div(1.0f, zt_from_bf16(scale)) : 0.0f; }

// Of bits, which order as floats that are not negative do, and become one instruction where a comparison of floats becomes a branch.
ZT_FN zt_u32 zt_lower(zt_u32 a, zt_u32 b) { return a < b ? a : b; }
ZT_FN zt_u32 zt_higher(zt_u32 a, zt_u32 b) { return a > b ? a : b; }

// `inverse` of the block's scale. The code below or above, so that the mean over `noise16` is x.
template <bool SIGNED>
ZT_FN int zt_to_code(float x, float inverse, zt_u32 noise16) {
  const float most = SIGNED ? 127.0f : 255.0f, u = zt_mul((float)(int)noise16, 1.52587890625e-05f);
  const float y = zt_mul(zt_float(zt_bits(x) & 0x7fffffffu), inverse);
  const float part = zt_mul(y, SIGNED ? 16129.0f : 4228250625.0f);  // most^2, most^4
  const float root = SIGNED ? zt_sqrt(part) : zt_sqrt(zt_sqrt(part));
  const float k = (float)(int)zt_float(zt_lower(zt_bits(root), zt_bits(most)));  // most for NaN
  const float square = zt_mul(k, k), odd = zt_add(zt_add(k, k), 1.0f), next = zt_add(square, odd);
  const float below = SIGNED ? square : zt_mul(square, square);
  const float step = SIGNED ? odd : zt_mul(zt_add(next, square), odd);
  const float up = zt_add(k, zt_mul(u, step) < zt_sub(part, below) ? 1.0f : 0.0f);
  const zt_u32 least = SIGNED ? 0u : zt_lower(zt_bits(part), 1u) * 0x3f800000u;  // 1.0f where part is not 0
  const zt_u32 raised = zt_lower(zt_higher(zt_bits(up), least), zt_bits(most));
  return (int)zt_float(raised | (SIGNED ? zt_bits(x) & 0x80000000u : 0u));
}

template <bool SIGNED>
ZT_FN float zt_from_code(int code, float scale) {
  const float t = zt_mul((float)code, SIGNED ? 1.0f / 127.0f : 1.0f / 255.0f);
  const float square = zt_mul(t, SIGNED ? zt_float(zt_bits(t) & 0x7fffffffu) : t);
  return zt_mul(SIGNED ? square : zt_mul(square, square), scale);
}

#endif
