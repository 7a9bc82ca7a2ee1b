//! A rank that is stuck or gone is named with its place on the mesh, in every group that waits for it.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use ferrospeed_comm::topology::{DATA, MODEL};
use ferrospeed_comm::{Limits, Mesh, ProcessTopology, ReduceOp, World};

const LOST: usize = 3;

/// What the ranks that wait for rank 3 of a mesh of 2 × 2 are told, by the axis of the group they wait in.
fn told(stays: bool) -> Vec<(usize, &'static str, String)> {
    let limits = Limits { deadline: Duration::from_secs(2), ..Limits::default() };
    let (done, all_done) = channel::<()>();
    let mut all_done = Some(all_done);
    let ranks: Vec<_> = World::threads_within(4, &limits)
        .unwrap()
        .into_iter()
        .map(|world| {
            let done = done.clone();
            let wait = if world.rank() == LOST { all_done.take() } else { None };
            std::thread::spawn(move || {
                let ends = done;
                let rank = world.rank();
                let topology = ProcessTopology::new([(DATA, 2), (MODEL, 2)]).unwrap();
                let mesh = Mesh::new(world, topology).unwrap();
                let groups = [(DATA, mesh.data().unwrap()), (MODEL, mesh.tensor().unwrap())];
                if let Some(wait) = wait {
                    // Until the others have given up: their ends of the channel close then.
                    drop(ends);
                    if stays {
                        let closed = wait.recv_timeout(Duration::from_secs(30));
                        assert_eq!(closed, Err(RecvTimeoutError::Disconnected));
                    }
                    return Vec::new();
                }
                let waits = groups.into_iter().filter(|(_, group)| group.ranks().contains(&LOST));
                let told = waits.map(|(axis, group)| {
                    let error = group.all_reduce(&mut [1.0f32], ReduceOp::Sum).unwrap_err();
                    (rank, axis, error.to_string())
                });
                told.collect()
            })
        })
        .collect();
    drop(done);
    ranks.into_iter().flat_map(|rank| rank.join().unwrap()).collect()
}

#[test]
fn a_stuck_or_lost_rank_is_named_with_its_coordinates() {
    for stays in [true, false] {
        let told = told(stays);
        let waiting: Vec<(usize, &str)> = told.iter().map(|(rank, axis, _)| (*rank, *axis)).collect();
        assert_eq!(waiting, [(1, DATA), (2, MODEL)]);
        for (_, _, error) in told {
            assert!(error.contains("rank 3 (data 1, model 1)"), "{error}");
        }
    }
}
