#include "vec_avx2.h"

#include "sampling_kernels.h"

namespace hf_paged {
const SamplingKernels sampling_avx2 = {avx2::best, avx2::draw, avx2::measure, avx2::largest};
}
