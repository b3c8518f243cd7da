// From the sum of squared gradients to what the update needs: the norm, the factor on the gradients, and whether to skip.
#ifndef ZT_CONTROL_H
#define ZT_CONTROL_H

#include "zt_common.h"

#if defined(__CUDACC__)
ZT_FN double zt_dmul(double a, double b) { return __dmul_rn(a, b); }
ZT_FN double zt_dadd(double a, double b) { return __dadd_rn(a, b); }
ZT_FN double zt_ddiv(double a, double b) { return __ddiv_rn(a, b); }
ZT_FN double zt_dsqrt(double a) { return __dsqrt_rn(a); }
#else
ZT_FN double zt_dmul(double a, double b) { return a * b; }
ZT_FN double zt_dadd(double a, double b) { return a + b; }
ZT_FN double zt_ddiv(double a, double b) { return a / b; }
ZT_FN double zt_dsqrt(double a) { return __builtin_sqrt(a); }
#endif

struct ZtControl {
  double unscale;  // from a reduced gradient to the averaged one, without the loss scale
  double clip;     // limit of the norm; 0: none

  // `scale` is the loss scale. control[0] becomes the norm, [1] the factor, [2] 1 where the norm is not finite.
  ZT_METHOD void apply(double square_sum, double scale, float* control) const {
    const double factor = zt_ddiv(unscale, scale);
    const double norm = zt_dmul(zt_dsqrt(square_sum), factor);
    const bool finite = norm - norm == 0.0;
    double limited = 1.0;
    if (clip > 0.0 && finite) {
      limited = zt_ddiv(clip, zt_dadd(norm, 1e-6));  // as torch's clip_grad_norm_
      if (limited > 1.0) limited = 1.0;
    }
    control[0] = (float)norm;
    control[1] = (float)zt_dmul(factor, limited);
    control[2] = finite ? 0.0f : 1.0f;
  }
};

#endif
