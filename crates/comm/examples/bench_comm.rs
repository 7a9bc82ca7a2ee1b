//! Measures collectives as one rank of a job: start it once per rank, with `RANK`, `WORLD_SIZE` and `MASTER_PORT` set.
//!
//! `bench_comm OPERATION,… BYTES,… DTYPE,… [registered|staged|both]`; rank 0 prints one JSON object per row.

use std::time::Duration;

use ferrospeed_comm::bench::{Matrix, Memory, run};
use ferrospeed_comm::{ConnectOptions, DType, Kind, World};

fn named<T: Copy>(all: &[T], name: impl Fn(T) -> &'static str, wanted: &str) -> Result<Vec<T>, String> {
    let find = |word: &str| {
        all.iter().copied().find(|item| name(*item) == word).ok_or(format!("unknown name {word:?}"))
    };
    wanted.split(',').map(find).collect()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let word = |index: usize, usual: &str| words.get(index).cloned().unwrap_or_else(|| usual.to_owned());
    let sizes: Result<Vec<usize>, _> = word(1, "1048576").split(',').map(str::parse).collect();
    let matrix = Matrix {
        operations: named(&Kind::ALL, Kind::name, &word(0, "all_reduce,all_gather,reduce_scatter"))?,
        sizes_bytes: sizes?,
        dtypes: named(&DType::ALL, DType::name, &word(2, "f32"))?,
        memories: match word(3, "both").as_str() {
            "registered" => vec![Memory::Registered],
            "staged" => vec![Memory::Staged],
            _ => vec![Memory::Registered, Memory::Staged],
        },
        time_per_row: Duration::from_millis(word(4, "500").parse()?),
    };
    let world = World::connect(ConnectOptions::from_env()?)?;
    for row in run(&world, &matrix)? {
        if world.rank() == 0 {
            println!("{}", serde_json::to_string(&row)?);
        }
    }
    Ok(())
}
