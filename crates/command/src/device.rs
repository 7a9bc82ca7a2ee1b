//! The device that a command computes on.

use ferrospeed_tensor::Device;

use crate::Failure;

/// What `--device` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceChoice {
    /// A GPU where there is one, else the processor.
    #[default]
    Auto,
    /// The processor.
    Cpu,
    /// A GPU, by its number or by this process's place on the host; an error where there is none.
    Cuda(Option<usize>),
}

impl DeviceChoice {
    /// Reads `auto`, `cpu`, `cuda` and `cuda:N`.
    pub fn parse(text: &str) -> Result<DeviceChoice, String> {
        match text {
            "auto" => Ok(DeviceChoice::Auto),
            "cpu" => Ok(DeviceChoice::Cpu),
            "cuda" => Ok(DeviceChoice::Cuda(None)),
            other => match other.strip_prefix("cuda:").map(str::parse) {
                Some(Ok(number)) => Ok(DeviceChoice::Cuda(Some(number))),
                _ => Err("use auto, cpu, cuda or cuda:NUMBER".to_owned()),
            },
        }
    }

    /// Opens it. Ranks of one host take its GPUs in turn.
    pub fn open(self) -> Result<Device, Failure> {
        let failed = |error: ferrospeed_tensor::TensorError| Failure::Run(error.to_string());
        let local_rank =
            || std::env::var("LOCAL_RANK").ok().and_then(|rank| rank.parse::<usize>().ok()).unwrap_or(0);
        match self {
            DeviceChoice::Cpu => Ok(ferrospeed_cpu::device()),
            DeviceChoice::Cuda(Some(number)) => {
                ferrospeed_cuda::device(number, &ferrospeed_cpu::device()).map_err(failed)
            }
            DeviceChoice::Cuda(None) => ferrospeed_cuda::device(
                local_rank() % ferrospeed_cuda::device_count().max(1),
                &ferrospeed_cpu::device(),
            )
            .map_err(failed),
            DeviceChoice::Auto => match ferrospeed_cuda::device_count() {
                0 => Ok(ferrospeed_cpu::device()),
                count => {
                    ferrospeed_cuda::device(local_rank() % count, &ferrospeed_cpu::device()).map_err(failed)
                }
            },
        }
    }
}

impl std::fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            DeviceChoice::Auto => f.write_str("auto"),
            DeviceChoice::Cpu => f.write_str("cpu"),
            DeviceChoice::Cuda(None) => f.write_str("cuda"),
            DeviceChoice::Cuda(Some(number)) => write!(f, "cuda:{number}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_read_back_what_they_print() {
        for text in ["auto", "cpu", "cuda", "cuda:3"] {
            assert_eq!(DeviceChoice::parse(text).unwrap().to_string(), text);
        }
        assert!(DeviceChoice::parse("cuda:x").is_err() && DeviceChoice::parse("gpu").is_err());
    }

    #[test]
    fn asking_for_a_gpu_that_is_not_there_says_what_is_missing() {
        if ferrospeed_cuda::device_count() > 0 {
            return;
        }
        let Err(failure) = DeviceChoice::Cuda(None).open() else { panic!("there is no device") };
        assert!(failure.to_string().contains("libcuda") || failure.to_string().contains("CUDA"), "{failure}");
        assert!(DeviceChoice::Auto.open().is_ok());
    }
}
