//! `ferrospeed bench gemm` and `ops`: matrix products of training shapes, and the fused operations forward and backward.
//!
//! `benches/peers/run-kernels.sh` runs the same cases in PyTorch and prints the ratios. Each case is repeated for a
//! given time after a warm-up; both the best and the median run are reported, since on a machine that is shared
//! only the best says what the kernel can do.

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use ferrospeed_command::Failure;
use ferrospeed_tensor::backend::{Gemm, Matrix};
use ferrospeed_tensor::ops::{self, AttentionOptions, CrossEntropyOptions, WeightLayout};
use ferrospeed_tensor::{Activation, DType, Device, Result, Tensor, TensorError};
use serde_json::{Value, json};

use super::measure::{Precision, ids, random, there_and_back, time};

#[derive(Debug, Args)]
pub(super) struct RunArgs {
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

pub(super) fn run_gemm(args: &RunArgs) -> Result<ExitCode, Failure> {
    run(args, gemm_cases)
}

pub(super) fn run_ops(args: &RunArgs) -> Result<ExitCode, Failure> {
    run(args, op_cases)
}

fn run(
    args: &RunArgs,
    cases: impl Fn(DType, &Device, &str) -> Result<Vec<Case>>,
) -> Result<ExitCode, Failure> {
    match measure(args, cases) {
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
        let inputs = vec![random(&[VOCABULARY, WIDTH], dtype, device)?, ids(&[tokens], VOCABULARY, device)?];
        Ok(there_and_back(inputs, |x| ops::embedding(&x[0], &x[1])))
    })?;
    let rows = 1024;
    add("linear_cross_entropy 1024x50257".into(), 6.0 * (rows * WIDTH * VOCABULARY) as f64, &|| {
        let inputs = vec![
            random(&[rows, WIDTH], dtype, device)?,
            // As wide as trained logits: random weights of size 1 make softmax all ones and denormals.
            ops::affine(&random(&[VOCABULARY, WIDTH], dtype, device)?, 0.02, 0.0)?,
            ids(&[rows], VOCABULARY, device)?,
        ];
        Ok(there_and_back(inputs, |x| {
            let options = CrossEntropyOptions::default();
            ops::linear_cross_entropy(&x[0], &x[1], WeightLayout::OutIn, &x[2], options)
        }))
    })?;
    Ok(cases)
}
