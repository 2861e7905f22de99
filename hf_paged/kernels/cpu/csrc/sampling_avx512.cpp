#include "vec_avx512.h"

#include "sampling_kernels.h"

namespace hf_paged {
const SamplingKernels sampling_avx512 = {avx512::best, avx512::draw, avx512::measure, avx512::largest};
}
