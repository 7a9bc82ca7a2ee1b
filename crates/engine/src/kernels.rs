//! Under which name a checkpoint knows the kernels that computed it. Matrix products group their sums by the registers they have, so a
//! run that goes on with others goes on to other bits.

use ferrospeed_checkpoint::Origin;
use ferrospeed_tensor::Device;
use ferrospeed_tensor::cpu::multiplies_in_tiles;
use ferrospeed_tensor::cpu::simd::{Level, level, wants_pairs};

/// The word of `FERROSPEED_CPU_KERNELS` for a processor's, or `amx`; the name of a GPU.
pub(crate) fn kernels_of(device: &Device) -> String {
    if !device.backend().is_host() {
        return device.backend().name();
    }
    let name = match level() {
        _ if multiplies_in_tiles() => "amx",
        Level::Avx512 if wants_pairs() && multiplies_pairs() => "avx512_bf16",
        Level::Avx512 => "avx512",
        Level::Avx2 => "avx2",
        Level::Portable => "portable",
    };
    name.to_owned()
}

/// What is to be said where a checkpoint was computed by others than a device's; earlier ones do not say by which.
pub(crate) fn other_kernels(origin: &Origin, device: &Device) -> Option<String> {
    let (before, now) = (origin.kernels.as_ref()?, kernels_of(device));
    let told = || {
        format!("kernels: {before} -> {now}: sums are grouped otherwise, so the run goes on to other bits")
    };
    (*before != now).then(told)
}

/// Whether the processor multiplies pairs of bf16.
fn multiplies_pairs() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx512bf16");
    #[cfg(not(target_arch = "x86_64"))]
    return false;
}
