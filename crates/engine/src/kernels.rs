//! Under which name a checkpoint knows the kernels that computed it. Matrix products group their sums by the registers they have, so a
//! run that goes on with others goes on to other bits.

use ferrospeed_checkpoint::Origin;
use ferrospeed_tensor::Device;

/// What is to be said where a checkpoint was computed by others than a device's; earlier ones do not say by which.
pub(crate) fn other_kernels(origin: &Origin, device: &Device) -> Option<String> {
    let (before, now) = (origin.kernels.as_ref()?, device.backend().kernels());
    let told = || {
        format!("kernels: {before} -> {now}: sums are grouped otherwise, so the run goes on to other bits")
    };
    (*before != now).then(told)
}
