//! Reductions so large that ranks work through them window by window. Apart from the other tests, which count this
//! process's shared memory.

use super::support::on_threads;
use ferrospeed_comm::{DType, ReduceOp, Region};

#[test]
fn large_reductions_over_registered_memory_give_the_reference_bits() {
    // Each rank folds enough to forget pages behind it.
    const ELEMENTS: usize = 27 << 20;
    on_threads(3, |world| {
        let (rank, group) = (world.rank(), world.group());
        let value = |rank: usize, at: usize| ((at * 7 + rank * 13) % 1000) as f32 - 400.0;
        let all = world.allocate(4 * (ELEMENTS + 5)).unwrap().region();
        let kept = world.allocate(4 * ELEMENTS).unwrap().region();
        // Not at the beginning of a page.
        let data = all.slice(20..20 + 4 * ELEMENTS);
        let fill = || {
            // SAFETY: no operation is in flight, and only this rank writes its own memory.
            let data = unsafe { data.as_mut_slice::<f32>() };
            data.iter_mut().enumerate().for_each(|(at, element)| *element = value(rank, at));
        };
        let sum = |at: usize| value(0, at) + value(1, at) + value(2, at);
        let check = |what: &str, result: &Region, first: usize| {
            // SAFETY: the operation is done.
            let result = unsafe { result.as_slice::<f32>() };
            let wrong = result.iter().enumerate().find(|(at, element)| **element != sum(first + at));
            assert_eq!(wrong, None, "{what} on rank {rank}");
        };
        fill();
        group.all_reduce_async(&data, DType::F32, ReduceOp::Sum).wait().unwrap();
        check("all_reduce", &data, 0);
        for counts in [[ELEMENTS - 3, 3, 0], [9 << 20, 13 << 20, 5 << 20]] {
            let first: usize = counts[..rank].iter().sum();
            let own = data.slice(4 * first..4 * (first + counts[rank]));
            let private = Region::zeroed(own.len());
            for (what, output) in [("kept", kept.slice(0..own.len())), ("private", private), ("own", own)] {
                group.barrier().unwrap();
                fill();
                let work =
                    group.reduce_scatter_unequal_async(&data, &output, &counts, DType::F32, ReduceOp::Sum);
                work.wait().unwrap();
                check(what, &output, first);
            }
        }
    });
}
