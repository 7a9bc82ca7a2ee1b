//! `ferrospeed bench`: how fast this machine is, in numbers that a peer's can be laid beside. Kernels are measured here,
//! models in `bench_model.rs`, several ranks in `bench_engine.rs`, GPUs in `bench_gpu.rs`, collectives in `bench_comm.rs`, packing for the wire in `bench_wire.rs`, the
//! optimizer's pass over memory in `bench_optimizer.rs`, pipelines in `bench_pipeline.rs`, looking at steps in `bench_profile.rs`, disks in `bench_io.rs`, serving in
//! `bench_serve.rs`.
//!
//! `benches/peers/run-kernels.sh` runs the same cases in PyTorch and prints the ratios. Each case is repeated for a
//! given time after a warm-up; both the best and the median run are reported, since on a machine that is shared
//! only the best says what the kernel can do.

use std::io::Write;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Args, Subcommand, ValueEnum};
use ferrospeed_tensor::backend::{Gemm, Matrix};
use ferrospeed_tensor::ops::{self, AttentionOptions, CrossEntropyOptions, WeightLayout};
use ferrospeed_tensor::random::RandomKey;
use ferrospeed_tensor::{Activation, DType, Device, Result, Tensor, TensorError, autograd};
use serde_json::{Value, json};

use super::{
    bench_checkpoint, bench_comm, bench_engine, bench_gpu, bench_io, bench_model, bench_optimizer,
    bench_pipeline, bench_profile, bench_serve, bench_wire, place,
};
use crate::failure::Failure;

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Matrix products of training shapes
    Gemm(RunArgs),
    /// Forward and backward of the fused operations
    Ops(RunArgs),
    /// Whole training steps and text generation
    Model(bench_model::ModelBenchArgs),
    /// Training steps of several ranks, for each ZeRO stage
    Engine(bench_engine::EngineBenchArgs),
    /// Training steps and text generation on a GPU
    Gpu(bench_gpu::GpuBenchArgs),
    /// The optimizer's pass over memory, beside what the memory gives
    Optimizer(bench_optimizer::OptimizerBenchArgs),
    /// Pipeline schedules: their bubbles and what stages hold, beside the formulas
    Pipeline(bench_pipeline::PipelineBenchArgs),
    /// What it costs to count, trace or watch a step
    Profile(bench_profile::ProfileBenchArgs),
    /// Collectives between ranks
    Comm(Box<bench_comm::CommArgs>),
    /// Values packed for the wire and back, beside what the memory gives
    Wire(bench_wire::WireBenchArgs),
    /// Serving: tokens per second, and how long clients wait
    Serve(Box<bench_serve::ServeBenchArgs>),
    /// A disk's reads and writes, and an optimizer step whose states are there
    Io(bench_io::IoBenchArgs),
    /// Saving and loading training state, beside what the disk gives
    Checkpoint(bench_checkpoint::CheckpointBenchArgs),
}

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

#[derive(Debug, Args)]
struct RunArgs {
    /// Numbers of threads to measure with
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2])]
    threads: Vec<usize>,
    /// Element types to measure
    #[arg(long, value_delimiter = ',', value_enum, default_values_t = [Precision::F32, Precision::Bf16])]
    dtype: Vec<Precision>,
    /// Only cases whose name contains this
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,
    /// Milliseconds spent on each case, after its warm-up
    #[arg(long = "case_ms", alias = "case-ms", value_name = "MS", default_value_t = 300)]
    case_ms: u64,
    /// Print JSON, one object per line
    #[arg(long)]
    json: bool,
}

/// One thing to measure: its name, the work of one run, and the run itself.
struct Case {
    name: String,
    /// Floating-point operations of one run; zero where bytes, not operations, are the limit.
    flops: f64,
    run: Box<dyn FnMut() -> Result<()>>,
}

pub(crate) fn run(args: &BenchArgs) -> Result<ExitCode, Failure> {
    let (run_args, cases): (_, fn(DType, &Device, &str) -> Result<Vec<Case>>) = match &args.what {
        What::Gemm(args) => (args, gemm_cases),
        What::Ops(args) => (args, op_cases),
        What::Model(args) => return bench_model::run(args),
        What::Engine(args) => return bench_engine::run(args),
        What::Gpu(args) => return bench_gpu::run(args),
        What::Optimizer(args) => return bench_optimizer::run(args),
        What::Pipeline(args) => return bench_pipeline::run(args),
        What::Profile(args) => return bench_profile::run(args),
        What::Comm(args) => return bench_comm::run(args),
        What::Wire(args) => return bench_wire::run(args),
        What::Serve(args) => return bench_serve::run(args),
        What::Io(args) => return bench_io::run(args),
        What::Checkpoint(args) => {
            if place::of_this_process()?.is_some_and(|place| place.world_size > 1) {
                let text = "bench checkpoint starts its own ranks: run it without a launcher, with --ranks";
                return Err(Failure::Usage(text.to_owned()));
            }
            return bench_checkpoint::run(args);
        }
    };
    match measure(run_args, cases) {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error @ TensorError::BadArgument { .. }) => Err(Failure::Usage(error.to_string())),
        Err(error) => Err(Failure::Run(error.to_string())),
    }
}

fn measure(args: &RunArgs, cases: impl Fn(DType, &Device, &str) -> Result<Vec<Case>>) -> Result<()> {
    let mut measured = 0;
    for &threads in &args.threads {
        if threads == 0 {
            return Err(TensorError::BadArgument { op: "bench", what: "--threads 0: at least one".into() });
        }
        for precision in &args.dtype {
            let device = ferrospeed_cpu::with_threads(threads);
            for mut case in cases(precision.dtype(), &device, &args.only)? {
                let (best_s, median_s) = time(&mut case.run, Duration::from_millis(args.case_ms))?;
                report(args, threads, precision.dtype(), &case, best_s, median_s);
                measured += 1;
            }
        }
    }
    if measured == 0 {
        let what =
            format!("--only {}: no case has that in its name; without --only all are shown", args.only);
        return Err(TensorError::BadArgument { op: "bench", what });
    }
    Ok(())
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

fn report(args: &RunArgs, threads: usize, dtype: DType, case: &Case, best_s: f64, median_s: f64) {
    let gflops = case.flops / best_s / 1e9;
    let line = if args.json {
        let value: Value = json!({
            "case": case.name, "dtype": dtype.name(), "threads": threads,
            "best_s": best_s, "median_s": median_s, "gflops": gflops,
        });
        value.to_string()
    } else {
        format!(
            "{:<34} {:<5} {threads:>2} threads  best {:>9.3} ms  median {:>9.3} ms  {gflops:>8.1} GFLOP/s",
            case.name,
            dtype.name(),
            best_s * 1e3,
            median_s * 1e3,
        )
    };
    // A reader that has gone (a closed pipe) needs no more lines, and no complaint.
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// Random values of a fixed seed.
pub(super) fn random(shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    let mut pattern = vec![0.0f32; 65_537];
    RandomKey::new(1, 0).fill_normal(0, &mut pattern);
    let values: Vec<f32> = pattern.into_iter().cycle().take(shape.iter().product()).collect();
    Tensor::from_f32(&values, shape, dtype, device)
}

/// A width of GPT-2's shape, whose heads have 64 each.
pub(super) fn parse_width(text: &str) -> Result<u64, String> {
    let width =
        text.parse().ok().filter(|width: &u64| (1..=1 << 20).contains(width) && width.is_multiple_of(64));
    width.ok_or_else(|| "must be a multiple of 64: heads of this model have that many".to_owned())
}

pub(super) fn ids(count: usize, limit: usize, device: &Device) -> Result<Tensor> {
    let values: Vec<i64> = (0..count).map(|i| ((i * 7919 + 13) % limit) as i64).collect();
    Tensor::from_slice(&values, [count], device)
}

/// Tokens × inputs × outputs of the layers that are measured.
const LAYERS: [[usize; 3]; 8] = [
    [512, 768, 768],
    [512, 1024, 4096],
    [1024, 768, 3072],
    [1024, 3072, 768],
    [2048, 1024, 4096],
    [2048, 2048, 2048],
    [4096, 768, 2304],
    [4096, 4096, 1024],
];

/// The same with the few tokens of decoding, where reading the weight is the limit.
const DECODE_LAYERS: [[usize; 3]; 4] = [[1, 768, 2304], [1, 3072, 768], [1, 768, 50257], [8, 4096, 4096]];

/// The three products of each layer: forward with `[in, out]` (NN) and `[out, in]` weights (NT), the weight's gradient (TN).
fn gemm_cases(dtype: DType, device: &Device, only: &str) -> Result<Vec<Case>> {
    let mut cases = Vec::new();
    let training = LAYERS.iter().map(|layer| ("", layer, &["NN", "NT", "TN"][..]));
    let decoding = DECODE_LAYERS.iter().map(|layer| ("decode ", layer, &["NN", "NT"][..]));
    for (kind, &[tokens, inputs, outputs], layouts) in training.chain(decoding) {
        for &layout in layouts {
            let name = format!("{kind}{layout} {tokens}x{inputs}x{outputs}");
            if !name.contains(only) {
                continue;
            }
            let (m, n, k) = match layout {
                "TN" => (inputs, outputs, tokens),
                _ => (tokens, outputs, inputs),
            };
            let x = random(&[tokens, inputs], dtype, device)?;
            let y = match layout {
                "NN" => random(&[inputs, outputs], dtype, device)?,
                "NT" => random(&[outputs, inputs], dtype, device)?,
                _ => random(&[tokens, outputs], dtype, device)?,
            };
            let mut result = Tensor::empty([m, n], dtype, device)?;
            let run = move || {
                let a = Matrix { transposed: layout == "TN", ..Matrix::whole(&x) };
                let b = Matrix { transposed: layout == "NT", ..Matrix::whole(&y) };
                x.device().backend().gemm(Gemm::plain(m, n, k, a, b, result.out()?))
            };
            cases.push(Case { name, flops: 2.0 * (m * n * k) as f64, run: Box::new(run) });
        }
    }
    Ok(cases)
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

fn op_cases(dtype: DType, device: &Device, only: &str) -> Result<Vec<Case>> {
    const HEADS: usize = 12;
    const DIM: usize = 64;
    const WIDTH: usize = 768;
    const VOCABULARY: usize = 50257;
    let tokens = 4096;
    let mut cases = Vec::new();
    let mut add = |name: String, flops: f64, make: &dyn Fn() -> Result<Box<dyn FnMut() -> Result<()>>>| {
        if name.contains(only) {
            cases.push(Case { name, flops, run: make()? });
        }
        Ok::<(), TensorError>(())
    };
    for length in [256, 512, 1024, 2048] {
        let batch = 2048 / length;
        // Two products forward, five back, half of each hidden by the mask.
        let flops = (7 * batch * HEADS * length * length * DIM) as f64;
        add(format!("attention {batch}x{length}"), flops, &|| {
            let part = || random(&[batch, length, HEADS, DIM], dtype, device);
            Ok(there_and_back(vec![part()?, part()?, part()?], |x| {
                let options = AttentionOptions { causal: true, ..Default::default() };
                ops::attention(&x[0], &x[1], &x[2], &options)
            }))
        })?;
    }
    let matrix = |width: usize| random(&[tokens, width], dtype, device);
    let vector = || random(&[WIDTH], dtype, device);
    add("layer_norm 4096x768".into(), 0.0, &|| {
        Ok(there_and_back(vec![matrix(WIDTH)?, vector()?, vector()?], |x| {
            ops::layer_norm(&x[0], Some((&x[1]).into()), Some((&x[2]).into()), 1e-5)
        }))
    })?;
    add("rms_norm 4096x768".into(), 0.0, &|| {
        Ok(there_and_back(vec![matrix(WIDTH)?, vector()?], |x| {
            ops::rms_norm(&x[0], Some((&x[1]).into()), 1e-5)
        }))
    })?;
    add("gelu 4096x3072".into(), 0.0, &|| {
        Ok(there_and_back(vec![matrix(4 * WIDTH)?], |x| ops::gelu_tanh(&x[0])))
    })?;
    add("swiglu 4096x2048".into(), 0.0, &|| {
        Ok(there_and_back(vec![matrix(2048)?, matrix(2048)?], |x| ops::gated(Activation::Silu, &x[0], &x[1])))
    })?;
    add("embedding 50257x768".into(), 0.0, &|| {
        let inputs = vec![random(&[VOCABULARY, WIDTH], dtype, device)?, ids(tokens, VOCABULARY, device)?];
        Ok(there_and_back(inputs, |x| ops::embedding(&x[0], &x[1])))
    })?;
    let rows = 1024;
    add("linear_cross_entropy 1024x50257".into(), 6.0 * (rows * WIDTH * VOCABULARY) as f64, &|| {
        let inputs = vec![
            random(&[rows, WIDTH], dtype, device)?,
            // As wide as trained logits: random weights of size 1 make softmax all ones and denormals.
            ops::affine(&random(&[VOCABULARY, WIDTH], dtype, device)?, 0.02, 0.0)?,
            ids(rows, VOCABULARY, device)?,
        ];
        Ok(there_and_back(inputs, |x| {
            let options = CrossEntropyOptions::default();
            ops::linear_cross_entropy(&x[0], &x[1], WeightLayout::OutIn, &x[2], options)
        }))
    })?;
    Ok(cases)
}
