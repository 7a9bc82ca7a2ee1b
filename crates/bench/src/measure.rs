//! What several measurements share: types and inputs, repeated runs, and what the process has used.

use std::time::{Duration, Instant};

use clap::ValueEnum;
use ferrospeed_models::presets::{Preset, PresetSizes};
use ferrospeed_models::{Decoder, ModelConfig, ModelError, WindowRule};
use ferrospeed_tensor::random::RandomKey;
use ferrospeed_tensor::{DType, Device, Result, Tensor, autograd};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use serde_json::Value;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Precision {
    F32,
    Bf16,
}

impl Precision {
    pub(super) fn dtype(self) -> DType {
        match self {
            Precision::F32 => DType::F32,
            Precision::Bf16 => DType::BF16,
        }
    }
}

/// Best and median seconds of a run.
pub(super) fn time(run: &mut dyn FnMut() -> Result<()>, budget: Duration) -> Result<(f64, f64)> {
    run()?;
    run()?;
    let mut seconds = Vec::new();
    let start = Instant::now();
    while seconds.len() < 3 || start.elapsed() < budget {
        let began = Instant::now();
        run()?;
        seconds.push(began.elapsed().as_secs_f64());
    }
    seconds.sort_by(f64::total_cmp);
    Ok((seconds[0], seconds[seconds.len() / 2]))
}

/// Random values of a fixed seed.
pub(super) fn random(shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    let mut pattern = vec![0.0f32; 65_537];
    RandomKey::new(1, 0).fill_normal(0, &mut pattern);
    let values: Vec<f32> = pattern.into_iter().cycle().take(shape.iter().product()).collect();
    Tensor::from_f32(&values, shape, dtype, device)
}

/// A model of GPT-2's shape that reads so many tokens.
pub(super) fn gpt2(layers: u64, width: u64, vocabulary: u64, tokens: u64) -> Result<Decoder, ModelError> {
    let config = Preset::Gpt2.config(&PresetSizes {
        layers: Some(layers),
        width: Some(width),
        heads: None,
        vocabulary,
        sequence: tokens.max(1024),
        dropout: 0.0,
    });
    decoder(&config)
}

/// The model of a `config.json`.
pub(super) fn decoder(config: &Value) -> Result<Decoder, ModelError> {
    match ModelConfig::from_value(config, WindowRule::default())? {
        ModelConfig::Decoder(config) => Ok(Decoder::new(*config)),
        ModelConfig::Bert(_) => unreachable!("what is measured generates"),
    }
}

/// A width of GPT-2's shape, whose heads have 64 each.
pub(super) fn parse_width(text: &str) -> Result<u64, String> {
    let width =
        text.parse().ok().filter(|width: &u64| (1..=1 << 20).contains(width) && width.is_multiple_of(64));
    width.ok_or_else(|| "must be a multiple of 64: heads of this model have that many".to_owned())
}

/// Ids below a limit that look like no pattern.
pub(super) fn ids(shape: &[usize], limit: usize, device: &Device) -> Result<Tensor> {
    let count: usize = shape.iter().product();
    let values: Vec<i64> = (0..count).map(|i| ((i * 7919 + 13) % limit) as i64).collect();
    Tensor::from_slice(&values, shape, device)
}

/// Forward and backward of `op` over `inputs`.
pub(super) fn there_and_back(
    inputs: Vec<Tensor>,
    op: impl Fn(&[Tensor]) -> Result<Tensor> + 'static,
) -> Box<dyn FnMut() -> Result<()>> {
    let mut gradient: Option<Tensor> = None;
    Box::new(move || {
        let inputs: Vec<Tensor> = inputs
            .iter()
            .map(|input| if input.dtype().is_float() { input.detach().tracked() } else { input.clone() })
            .collect();
        let y = op(&inputs)?;
        if gradient.is_none() {
            gradient = Some(random(y.sizes(), y.dtype(), y.device())?);
        }
        match &gradient {
            Some(gradient) if y.numel() != 1 => autograd::backward_with(&[(y, gradient.clone())]),
            _ => autograd::backward(&y),
        }
    })
}

/// The most memory that this process ever held; `None` where the system does not say.
pub(super) fn peak_rss_bytes() -> Option<u64> {
    peak_rss_bytes_of(std::process::id())
}

/// The same of a process that may be another.
pub(super) fn peak_rss_bytes_of(process: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let kib = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?.trim().strip_suffix(" kB")?;
    Some(kib.trim().parse::<u64>().ok()? << 10)
}

/// Seconds of processor time that this process has used, all threads together.
pub(super) fn processor_s() -> f64 {
    getrusage(UsageWho::RUSAGE_SELF).map_or(0.0, |usage| {
        (usage.user_time().num_microseconds() + usage.system_time().num_microseconds()) as f64 / 1e6
    })
}
