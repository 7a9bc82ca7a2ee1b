//! What ranks can do, for the model of costs: given, or measured on this machine.
//!
//! A product, a copy, and a sum between ranks that are threads of this process. The last says what shared memory carries; what a
//! network or NVLink does must be given. So must everything of a machine that is not this one.

use clap::Args;
use ferrospeed_comm::World;
use ferrospeed_command::Failure;
use ferrospeed_engine::machine;
use ferrospeed_tensor::DType;
use ferrospeed_tune::cost::Rates;
use ferrospeed_tune::plan::Processor;

/// Bytes per second that are taken where nothing is said: PCIe, and a disk that all ranks of a host share.
const HOST_BYTES_PER_S: f64 = 2e10;
const DISK_BYTES_PER_S: f64 = 1e9;
/// Tokens of a micro-batch at which products reach half of their speed.
const HALF_SPEED_TOKENS_CPU: f64 = 256.0;
const HALF_SPEED_TOKENS_GPU: f64 = 4096.0;

#[derive(Debug, Args, Clone, Copy, Default)]
pub(crate) struct RateArgs {
    /// What one rank computes, in 10¹² floating-point operations per second; measured here when absent
    #[arg(long, value_name = "TFLOPS", allow_negative_numbers = true, value_parser = parse_rate)]
    flops: Option<f64>,
    /// What one rank moves between memory and cores, in GB/s; measured here when absent
    #[arg(long = "memory_rate", alias = "memory-rate", value_name = "GB/S", allow_negative_numbers = true, value_parser = parse_rate)]
    memory_rate: Option<f64>,
    /// What one rank sends to others of its host, in GB/s; between ranks without GPUs measured here when absent
    #[arg(long = "wire_rate", alias = "wire-rate", value_name = "GB/S", allow_negative_numbers = true, value_parser = parse_rate)]
    wire_rate: Option<f64>,
    /// What one rank sends to other hosts, in GB/s, while all of its host send [default: as within]
    #[arg(long = "link_rate", alias = "link-rate", value_name = "GB/S", allow_negative_numbers = true, value_parser = parse_rate)]
    link_rate: Option<f64>,
    /// What goes between a GPU and its host, in GB/s [default: 20]
    #[arg(long = "host_rate", alias = "host-rate", value_name = "GB/S", allow_negative_numbers = true, value_parser = parse_rate)]
    host_rate: Option<f64>,
    /// What a host's disk reads or writes, in GB/s [default: 1]
    #[arg(long = "disk_rate", alias = "disk-rate", value_name = "GB/S", allow_negative_numbers = true, value_parser = parse_rate)]
    disk_rate: Option<f64>,
}

impl RateArgs {
    /// Whether any rate was told.
    pub(super) fn is_given(&self) -> bool {
        let RateArgs { flops, memory_rate, wire_rate, link_rate, host_rate, disk_rate } = self;
        [flops, memory_rate, wire_rate, link_rate, host_rate, disk_rate].iter().any(|rate| rate.is_some())
    }
}

fn parse_rate(text: &str) -> Result<f64, String> {
    let rate: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    match (1e-6..=1e9).contains(&rate) {
        true => Ok(rate),
        false => {
            Err("no machine has such a rate: must be at least 0.000001 and at most 1000000000".to_owned())
        }
    }
}

/// Whose rates are asked for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ranks {
    pub(crate) count: u64,
    pub(crate) per_host: u64,
    pub(crate) processor: Processor,
    /// The type that products are measured in.
    pub(crate) dtype: DType,
    /// Whether they are this machine's, so that it can be measured.
    pub(crate) are_here: bool,
}

impl RateArgs {
    /// What was given, and what is measured of the rest.
    pub(crate) fn of(&self, ranks: &Ranks) -> Result<Rates, Failure> {
        let giga = |rate: f64| rate * 1e9;
        let missing = |option: &str, what: &str| {
            Failure::Usage(format!("{option}: {what} cannot be measured here; give it, as --{option} RATE"))
        };
        let per_host = ranks.per_host.clamp(1, ranks.count.max(1));
        let (flops_per_s, memory_bytes_per_s) = match (self.flops, self.memory_rate) {
            (Some(flops), Some(rate)) => (flops * 1e12, giga(rate)),
            (flops, rate) => {
                if !ranks.are_here {
                    let option = if flops.is_none() { "flops" } else { "memory_rate" };
                    return Err(missing(option, "another machine's speed"));
                }
                let (device, sharers) = match ranks.processor {
                    // All cores measure together, and ranks share them.
                    Processor::Cpu => (Ok(ferrospeed_cpu::device()), per_host as f64),
                    Processor::Gpu => (ferrospeed_cuda::device(0, &ferrospeed_cpu::device()), 1.0),
                };
                let peak = device.and_then(|device| machine::measure_peak(&device, ranks.dtype));
                let peak = peak.map_err(|error| Failure::Run(error.to_string()))?;
                (
                    flops.map_or(peak.flops_per_s / sharers, |flops| flops * 1e12),
                    rate.map_or(peak.bytes_per_s / sharers, giga),
                )
            }
        };
        let wire_bytes_per_s = match (self.wire_rate, ranks.processor) {
            (Some(rate), _) => giga(rate),
            // Nobody sends anything.
            (None, _) if ranks.count <= 1 => f64::INFINITY,
            (None, Processor::Cpu) if ranks.are_here => measured_wire(per_host)?,
            (None, _) => return Err(missing("wire_rate", "what ranks send each other")),
        };
        Ok(Rates {
            flops_per_s,
            memory_bytes_per_s,
            wire_bytes_per_s,
            link_bytes_per_s: self.link_rate.map(giga),
            ranks_per_host: per_host,
            host_bytes_per_s: self.host_rate.map_or(HOST_BYTES_PER_S, giga),
            disk_bytes_per_s: self.disk_rate.map_or(DISK_BYTES_PER_S, giga) / per_host as f64,
            half_speed_tokens: match ranks.processor {
                Processor::Cpu => HALF_SPEED_TOKENS_CPU,
                Processor::Gpu => HALF_SPEED_TOKENS_GPU,
            },
        })
    }

    /// The same for a search that corrects itself: what cannot be measured is guessed.
    pub(crate) fn guessed(ranks: &Ranks) -> Result<Rates, Failure> {
        let given = match ranks.processor {
            Processor::Cpu => RateArgs::default(),
            Processor::Gpu => RateArgs {
                flops: Some(200.0),
                memory_rate: Some(1500.0),
                wire_rate: Some(100.0),
                ..RateArgs::default()
            },
        };
        given.of(ranks)
    }
}

/// Of ranks that are threads here, as many as may be expected to have cores of their own.
fn measured_wire(ranks: u64) -> Result<f64, Failure> {
    let cores = std::thread::available_parallelism().map_or(2, std::num::NonZeroUsize::get);
    let ranks = (ranks as usize).clamp(2, cores.max(2));
    let threads: Vec<_> = World::threads(ranks)
        .into_iter()
        .map(|world| std::thread::spawn(move || machine::sent_bytes_per_s(&world)))
        .collect();
    let mut rates = Vec::with_capacity(ranks);
    for thread in threads {
        let measured = thread.join().map_err(|_| Failure::Run("a rank of a measurement failed".into()))?;
        rates.extend(measured.map_err(|error| Failure::Run(error.to_string()))?);
    }
    rates.into_iter().reduce(f64::min).ok_or_else(|| Failure::Run("no rank measured its wire".into()))
}
