//! `ferrospeed bench`: how fast this machine is, in numbers that a peer's can be laid beside. A module per subcommand:
//! `kernels` has `gemm` and `ops`, `model` whole steps of one rank, `engine` those of several, `gpu` those of GPUs, `comm`
//! collectives, `wire` packing for the wire, `optimizer` its pass over memory, `pipeline` schedules, `profile` what looking at
//! steps costs, `io` disks, `checkpoint` saves and loads, `serve` an engine or a server under requests.
//!
//! It measures and prints, and asserts nothing: what a figure should be is for `docs/` and whoever reads it. The peers' side of
//! most of them is in `benches/peers`.

mod checkpoint;
mod client;
mod comm;
mod engine;
mod gpu;
mod io;
mod kernels;
mod load;
mod measure;
mod model;
mod optimizer;
mod parts;
mod pipeline;
mod profile;
mod serve;
mod wire;

use std::process::ExitCode;

use clap::{Args, Subcommand};
use ferrospeed_command::Failure;

/// Arguments of `bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Matrix products of training shapes
    Gemm(kernels::RunArgs),
    /// Forward and backward of the fused operations
    Ops(kernels::RunArgs),
    /// Whole training steps and text generation
    Model(model::ModelBenchArgs),
    /// Training steps of several ranks, for each ZeRO stage
    Engine(engine::EngineBenchArgs),
    /// Training steps and text generation on a GPU
    Gpu(gpu::GpuBenchArgs),
    /// The optimizer's pass over memory, beside what the memory gives
    Optimizer(optimizer::OptimizerBenchArgs),
    /// Pipeline schedules: their bubbles and what stages hold, beside the formulas
    Pipeline(pipeline::PipelineBenchArgs),
    /// What it costs to count, trace or watch a step
    Profile(profile::ProfileBenchArgs),
    /// Collectives between ranks
    Comm(Box<comm::CommArgs>),
    /// Values packed for the wire and back, beside what the memory gives
    Wire(wire::WireBenchArgs),
    /// Serving: tokens per second, and how long clients wait
    Serve(Box<serve::ServeBenchArgs>),
    /// A disk's reads and writes, and an optimizer step whose states are there
    Io(io::IoBenchArgs),
    /// Saving and loading training state, beside what the disk gives
    Checkpoint(checkpoint::CheckpointBenchArgs),
}

/// Measures what was asked for.
///
/// # Errors
/// Arguments that fit nothing here, and measurements that could not be made.
pub fn run(args: &BenchArgs) -> Result<ExitCode, Failure> {
    match &args.what {
        What::Gemm(args) => kernels::run_gemm(args),
        What::Ops(args) => kernels::run_ops(args),
        What::Model(args) => model::run(args),
        What::Engine(args) => engine::run(args),
        What::Gpu(args) => gpu::run(args),
        What::Optimizer(args) => optimizer::run(args),
        What::Pipeline(args) => pipeline::run(args),
        What::Profile(args) => profile::run(args),
        What::Comm(args) => comm::run(args),
        What::Wire(args) => wire::run(args),
        What::Serve(args) => serve::run(args),
        What::Io(args) => io::run(args),
        What::Checkpoint(args) => checkpoint::run(args),
    }
}
