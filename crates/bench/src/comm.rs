//! `ferrospeed bench comm`: collectives, operation × size × type × memory × ranks × backend.
//!
//! Alone it starts the ranks of each combination on this host. Started as a rank (by `ferrospeed launch`, `mpirun` or
//! `srun`) it measures on the job it belongs to. `benches/peers/comm.py` runs the same matrix with Gloo and OpenMPI.

use std::process::ExitCode;
use std::time::Duration;

use clap::builder::PossibleValuesParser;
use clap::{Args, ValueEnum};
use ferrospeed_comm::bench::{Matrix, Memory, run as measure, table};
use ferrospeed_comm::{ConnectOptions, DType, Kind, World};
use ferrospeed_command::{Failure, parse_size, place, terminal};
use ferrospeed_launch::supervise::OutputMode;
use ferrospeed_launch::{JobOutcome, LocalJob};

#[derive(Debug, Args)]
pub(super) struct CommArgs {
    /// Numbers of ranks to start; ignored by a rank of a running job
    #[arg(long, value_name = "COUNT", value_delimiter = ',', default_values_t = [2], value_parser = clap::value_parser!(u32).range(1..=1024))]
    ranks: Vec<u32>,
    /// What carries the data; ignored by a rank of a running job
    #[arg(long, value_delimiter = ',', value_enum, default_values_t = [BackendChoice::Auto])]
    backend: Vec<BackendChoice>,
    /// Collectives to measure
    #[arg(long, value_name = "NAME", value_delimiter = ',', default_values_t = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"].map(String::from), value_parser = PossibleValuesParser::new(collectives().map(Kind::name)))]
    op: Vec<String>,
    /// Sizes of the whole buffer, such as 4KiB or 64MB
    #[arg(long, value_delimiter = ',', default_values = ["4KiB", "1MiB", "16MiB", "64MiB"], value_parser = parse_size)]
    size: Vec<usize>,
    /// Element types
    #[arg(long, value_name = "NAME", value_delimiter = ',', default_values_t = ["f32", "bf16"].map(String::from), value_parser = PossibleValuesParser::new(DType::ALL.map(DType::name)))]
    dtype: Vec<String>,
    /// Where the buffers lie; in-place and shared measure all_gather (and in-place reduce_scatter) alone
    #[arg(long, value_delimiter = ',', value_enum, default_values_t = [MemoryChoice::Registered, MemoryChoice::Staged])]
    memory: Vec<MemoryChoice>,
    /// Milliseconds spent on each row
    #[arg(long = "case_ms", alias = "case-ms", value_name = "MS", default_value_t = 300)]
    case_ms: u64,
    /// Print JSON, one object per line
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum BackendChoice {
    Auto,
    Local,
    Tcp,
    Mpi,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum MemoryChoice {
    Registered,
    InPlace,
    Shared,
    Staged,
}

fn collectives() -> impl Iterator<Item = Kind> {
    Kind::ALL.into_iter().filter(|kind| !matches!(kind, Kind::Send | Kind::Recv))
}

pub(super) fn run(args: &CommArgs) -> Result<ExitCode, Failure> {
    if let Some(place) = place::of_this_process()? {
        return run_rank(args, place);
    }
    for &ranks in &args.ranks {
        for &backend in &args.backend {
            let outcome = start_ranks(args, ranks, backend)?;
            if !matches!(outcome, JobOutcome::Succeeded) {
                if let JobOutcome::Failed(report) = &outcome {
                    terminal::print_error(&report.to_string());
                }
                return Ok(ExitCode::from(outcome.exit_code()));
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Starts this program again, once per rank.
fn start_ranks(args: &CommArgs, ranks: u32, backend: BackendChoice) -> Result<JobOutcome, Failure> {
    let program = std::env::current_exe()
        .map_err(|error| Failure::Run(format!("cannot find this program: {error}")))?;
    let sizes: Vec<String> = args.size.iter().map(usize::to_string).collect();
    let memories: Vec<String> = args.memory.iter().map(|memory| name_of(*memory)).collect();
    let mut words = vec!["bench".to_owned(), "comm".to_owned()];
    for (option, value) in [
        ("--op", args.op.join(",")),
        ("--size", sizes.join(",")),
        ("--dtype", args.dtype.join(",")),
        ("--memory", memories.join(",")),
        ("--case_ms", args.case_ms.to_string()),
    ] {
        words.extend([option.to_owned(), value]);
    }
    words.extend(args.json.then(|| "--json".to_owned()));
    let mut job = LocalJob::new(program.display().to_string(), words, ranks);
    job.output = OutputMode::Plain;
    job.env.insert("FERROSPEED_COMM_BACKEND".into(), name_of(backend));
    Ok(job.run()?)
}

fn name_of(choice: impl ValueEnum) -> String {
    choice.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

fn run_rank(args: &CommArgs, place: ConnectOptions) -> Result<ExitCode, Failure> {
    let failed = |error: ferrospeed_comm::Error| Failure::Run(error.to_string());
    let world = World::connect(place).map_err(failed)?;
    let matrix = Matrix {
        operations: collectives().filter(|kind| args.op.iter().any(|op| op == kind.name())).collect(),
        sizes_bytes: args.size.clone(),
        dtypes: DType::ALL
            .into_iter()
            .filter(|dtype| args.dtype.iter().any(|name| name == dtype.name()))
            .collect(),
        memories: args
            .memory
            .iter()
            .map(|memory| match memory {
                MemoryChoice::Registered => Memory::Registered,
                MemoryChoice::InPlace => Memory::InPlace,
                MemoryChoice::Shared => Memory::Shared,
                MemoryChoice::Staged => Memory::Staged,
            })
            .collect(),
        time_per_row: Duration::from_millis(args.case_ms),
    };
    let rows = measure(&world, &matrix).map_err(failed)?;
    if world.rank() == 0 {
        let text = if args.json {
            let line = |row| serde_json::to_string(row).map_err(|error| Failure::Run(error.to_string()));
            rows.iter().map(line).collect::<Result<Vec<String>, _>>()?.join("\n")
        } else {
            table(&rows)
        };
        terminal::print_output(&text)?;
    }
    Ok(ExitCode::SUCCESS)
}
