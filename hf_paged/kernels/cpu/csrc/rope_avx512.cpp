#include "vec_avx512.h"

#include "rope_kernels.h"

const hf_paged::RopeKernels hf_paged::rope_avx512 = {hf_paged::avx512::rope_store};
