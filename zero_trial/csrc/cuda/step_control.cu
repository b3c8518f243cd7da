// The scalars of a step, by one thread, so that the host does not wait for the norm.
#include "zt_control.h"
#include "zt_tile.h"

struct ZtStepControl {
  const double* square_sum;
  const float* scale;  // the loss scale; null: 1
  float* control;      // norm, factor, found_inf
  ZtControl op;
};

extern "C" __global__ void zt_step_control(const ZtStepControl launch) {
  if (blockIdx.x || threadIdx.x) return;
  ZT_ACCESS(launch.square_sum, 8, false);
  ZT_ACCESS(launch.control, 12, true);
  const double scale = launch.scale ? (double)*launch.scale : 1.0;
  launch.op.apply(*launch.square_sum, scale, launch.control);
}
