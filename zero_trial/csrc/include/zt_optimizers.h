// One element of one optimizer step: Adam and AdamW, Lion, Adagrad, SGD with momentum.
//
// Every struct holds scalars that were computed in double and rounded once. `apply(p, g, a, b)` updates the parameter p
// and the states a and b (b only where kStates is 2) from the gradient g, which is multiplied by `multiplier` first.
// Moments are interpolated, m + (1 - beta) (g - m), and the decay is part of the update rather than a factor on p: both
// halve the rounding error of the forms m beta + g (1 - beta) and p (1 - lr decay), and v stays unbiased over long runs.
//
// All fields are floats, `multiplier` is the first, and ops/spec.py computes them in this order. The list at the end names the structs.
#ifndef ZT_OPTIMIZERS_H
#define ZT_OPTIMIZERS_H

#include "zt_common.h"

// Kingma & Ba 2015, Algorithm 1; decoupled decay: Loshchilov & Hutter 2019, Algorithm 2.
struct ZtAdam {
  static const int kStates = 2;
  float multiplier;
  float rest1, rest2;          // 1 - beta1, 1 - beta2
  float step_size;             // lr / (1 - beta1^t)
  float inverse_root, eps;     // 1 / sqrt(1 - beta2^t)
  float coupled, decay;        // Adam: the weight decay; AdamW: lr times the weight decay. The other one is 0

  ZT_METHOD void apply(float& p, float g, float& m, float& v) const {
    g = zt_fma(coupled, p, zt_mul(g, multiplier));
    m = zt_fma(rest1, zt_sub(g, m), m);
    const float next = zt_fma(rest2, zt_fma(g, g, -v), v);
    v = v > 3.402823466e38f ? v : next;  // an infinite moment stays infinite instead of turning into NaN
    const float root = zt_fma(zt_sqrt(v), inverse_root, eps);
    p = zt_sub(p, zt_fma(step_size, zt_div(m, root), zt_mul(decay, p)));
  }
};

// Chen et al. 2023, "Symbolic discovery of optimization algorithms", Algorithm 2.
struct ZtLion {
  static const int kStates = 1;
  float multiplier;
  float rest1, rest2;  // 1 - beta1, 1 - beta2
  float lr, decay;     // decay = lr times the weight decay

  ZT_METHOD void apply(float& p, float g, float& m, float&) const {
    const float step = zt_sub(zt_mul(g, multiplier), m);
    const float c = zt_fma(rest1, step, m);
    m = zt_fma(rest2, step, m);
    const float sign = c > 0.0f ? 1.0f : c < 0.0f ? -1.0f : 0.0f;
    p = zt_sub(p, zt_fma(lr, sign, zt_mul(decay, p)));
  }
};

// Duchi, Hazan & Singer 2011, diagonal form (figure 1); the decay is part of the gradient, as in torch.
struct ZtAdagrad {
  static const int kStates = 1;
  float multiplier;
  float lr, eps;  // lr / (1 + (t - 1) lr_decay)
  float coupled;

  ZT_METHOD void apply(float& p, float g, float& s, float&) const {
    g = zt_fma(coupled, p, zt_mul(g, multiplier));
    s = zt_fma(g, g, s);
    p = zt_sub(p, zt_div(zt_mul(lr, g), zt_add(zt_sqrt(s), eps)));
  }
};

// Sutskever et al. 2013, equations 1 to 4, in torch's form: lr outside the buffer.
struct ZtSgd {
  static const int kStates = 1;
  float multiplier;
  float lr, coupled;
  float momentum, share;  // of the old buffer, of the new gradient; 0 and 1 in the first step
  float nesterov;         // the momentum once more, for Nesterov's form
  float plain;            // 0 for Nesterov's form, else 1

  ZT_METHOD void apply(float& p, float g, float& b, float&) const {
    g = zt_fma(coupled, p, zt_mul(g, multiplier));
    b = zt_fma(momentum, b, zt_mul(share, g));
    const float step = plain != 0.0f ? b : zt_fma(nesterov, b, g);
    p = zt_fma(-lr, step, p);
  }
};

// Every step that callers can ask for: its name in ops/spec.py, and its struct.
#define ZT_OPTIMIZERS(X) \
  X(adam, ZtAdam)        \
  X(lion, ZtLion)        \
  X(adagrad, ZtAdagrad)  \
  X(sgd, ZtSgd)

#endif
