// Optimizer states in bfloat16. ops/plain.py says the same in torch.
//
// Values are wide while a step computes and are rounded when they are stored, up or down at random, so that what is lost has mean 0:
// with beta2 = 0.999 a step changes v by less than half the distance of two bfloat16 numbers, and rounding to nearest would keep the
// old value forever. The noise is a hash of a tensor's key, which is another in every step, and of the element's place in its tensor:
// the same bits on every device, however tensors are cut over ranks, and after a resume. 16 of its bits are added below the last bit
// that is kept: the lower half for the first state, the upper for the second.
#ifndef ZT_STATES_H
#define ZT_STATES_H

#include "zt_common.h"

enum { kStateFloat32 = 0, kStateBFloat16 = 1 };

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

#endif
