//! Where a test runs that compares with plain loops: on the CPU, and on the first GPU where there is one.

use ferrospeed_tensor::Device;

/// With `FERROSPEED_TEST_DEVICE=cuda` in the environment there must be a GPU.
pub(crate) fn devices() -> Vec<Device> {
    let wanted = std::env::var("FERROSPEED_TEST_DEVICE").is_ok_and(|device| device == "cuda");
    let has_gpu = wanted || ferrospeed_cuda::device_count() > 0;
    let gpu = has_gpu.then(|| {
        ferrospeed_cuda::device(0, &ferrospeed_cpu::device()).unwrap_or_else(|error| panic!("{error}"))
    });
    std::iter::once(ferrospeed_cpu::with_threads(2)).chain(gpu).collect()
}
