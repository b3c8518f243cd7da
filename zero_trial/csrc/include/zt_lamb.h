// LAMB, one element: You et al. 2020, Algorithm 2. Adam's moments and direction first; the step once |p| and |direction| of the
// whole tensor are known.
#ifndef ZT_LAMB_H
#define ZT_LAMB_H

#include "zt_optimizers.h"

struct ZtLamb {
  float multiplier;
  float rest1, rest2;             // 1 - beta1, 1 - beta2
  float inverse1, inverse_root2;  // 1 / (1 - beta1^t), 1 / sqrt(1 - beta2^t); both 1 without bias correction
  float eps, decay, lr;

  ZT_METHOD void moments(float g, float& m, float& v) const {
    g = zt_mul(g, multiplier);
    m = zt_fma(rest1, zt_sub(g, m), m);
    const float next = zt_fma(rest2, zt_fma(g, g, -v), v);
    v = v > 3.402823466e38f ? v : next;
  }

  // Lines 9 to 11: r + decay p.
  ZT_METHOD float direction(float p, float m, float v) const {
    const float root = zt_fma(zt_sqrt(v), inverse_root2, eps);
    return zt_fma(decay, p, zt_div(zt_mul(m, inverse1), root));
  }

  // Line 12; `ratio` is |p| / |direction|, clamped.
  ZT_METHOD float step(float p, float direction, float ratio) const { return zt_fma(-zt_mul(lr, ratio), direction, p); }
};

#endif
