//! Properties of every schedule: no deadlock, bounded memory, the bubble of its formula.

use std::num::NonZeroUsize;

use ferrospeed_pipeline::schedule::{Instruction, Kind, Schedule};
use ferrospeed_pipeline::simulate::{Times, simulate};
use ferrospeed_pipeline::validate::{Sends, validate};
use ferrospeed_testkit::property::{Random, seeds};

fn interleaved(chunks: usize) -> Kind {
    Kind::Interleaved { chunks: NonZeroUsize::new(chunks).unwrap() }
}

#[test]
fn random_schedules_are_valid_and_hold_what_they_claim() {
    let mut random = Random(7);
    for _ in seeds(60) {
        let (p, v) = (1 + random.below(8), 1 + random.below(4));
        let m = 1 + random.below(24);
        let whole = |kind| Schedule::new(kind, p, m).unwrap();
        let groups = Schedule::new(interleaved(v), p, m.next_multiple_of(p)).unwrap();
        for schedule in
            [whole(Kind::OneForwardOneBackward), whole(Kind::ZeroBubbleH1), whole(Kind::ZeroBubbleV), groups]
        {
            let held = validate(&schedule, Sends::Buffered)
                .unwrap_or_else(|error| panic!("{} p={p} m={m} v={v}: {error}", schedule.kind));
            for (stage, held) in held.iter().enumerate() {
                let bound = match schedule.kind {
                    Kind::OneForwardOneBackward => (p - stage).min(m),
                    Kind::ZeroBubbleH1 => p.min(m),
                    Kind::ZeroBubbleV => (2 * p).min(2 * m),
                    // Warm-up, and the one that steady work adds.
                    _ => (2 * (p - stage - 1) + (v - 1) * p + 1).min(v * schedule.micro_batches),
                };
                let case = format!("{} p={p} m={m} v={v} stage {stage}", schedule.kind);
                assert!(held.activations <= bound, "{case}: {} > {bound}", held.activations);
                assert!(held.activations <= schedule.buffers[stage], "{case}");
            }
        }
        let at_once = whole(Kind::OneForwardOneBackward).sending_at_once();
        validate(&at_once, Sends::Buffered).unwrap();
        for stage in 0..p {
            let order: Vec<_> = at_once.instructions(stage).collect();
            let is_late = |pair: &[Instruction]| match pair[1] {
                Instruction::SendActivation(item) => pair[0] != Instruction::Forward(item),
                Instruction::SendGradient(item) => pair[0] != Instruction::Backward(item),
                _ => false,
            };
            assert!(!order.windows(2).any(is_late), "p={p} m={m} stage {stage}: {order:?}");
        }
        for kind in [Kind::OneForwardOneBackward, interleaved(v), Kind::ZeroBubbleH1, Kind::ZeroBubbleV] {
            let forward = Schedule::forward_of(kind, p, m).unwrap();
            assert_eq!(forward.stage_of_chunk, kind.placement(p));
            validate(&forward, Sends::Buffered).unwrap_or_else(|error| panic!("{kind} p={p} m={m}: {error}"));
            let works = |i: &Instruction| {
                matches!(i, Instruction::Step | Instruction::Reduce | Instruction::ReduceTied)
            };
            assert!(!(0..p).any(|stage| forward.instructions(stage).any(|i| works(&i))));
        }
        // What DeepSpeed runs with blocking sends must not depend on buffers.
        validate(&whole(Kind::OneForwardOneBackward), Sends::Blocking).unwrap();
        validate(&whole(Kind::Inference), Sends::Blocking).unwrap();
    }
}

#[test]
fn bubbles_are_those_of_the_formulas() {
    for p in [2usize, 3, 4, 8] {
        for m in [p, 2 * p, 6 * p] {
            let bubble =
                |kind| simulate(&Schedule::new(kind, p, m).unwrap(), &Times::default()).unwrap().bubble();
            // (p-1)/(m+p-1) of the time is the same as (p-1)/m of the work.
            let of_work = |bubble: f64| bubble / (1.0 - bubble);
            let plain = (p - 1) as f64 / m as f64;
            let close = |kind, expected: f64| {
                let found = of_work(bubble(kind));
                assert!((found - expected).abs() < 1e-9, "{kind} p={p} m={m}: {found} and not {expected}");
            };
            close(Kind::OneForwardOneBackward, plain);
            close(interleaved(2), plain / 2.0);
            close(interleaved(4), plain / 4.0);
            close(Kind::ZeroBubbleH1, plain / 3.0);
            if m >= 2 * p {
                close(Kind::ZeroBubbleV, 0.0);
            }
        }
    }
}

#[test]
fn a_schedule_that_never_receives_is_refused() {
    let mut schedule = Schedule::new(Kind::OneForwardOneBackward, 2, 3).unwrap();
    for step in &mut schedule.steps[0] {
        step.retain(|instruction| !matches!(instruction, Instruction::ReceiveGradient(_)));
    }
    let error = validate(&schedule, Sends::Buffered).unwrap_err().to_string();
    assert!(error.contains("comes before ReceiveGradient"), "{error}");
}

#[test]
fn a_send_that_is_missing_is_found_where_it_is_received() {
    let mut schedule = Schedule::new(Kind::ZeroBubbleH1, 3, 3).unwrap();
    for step in &mut schedule.steps[1] {
        step.retain(
            |instruction| !matches!(instruction, Instruction::SendActivation(item) if item.micro == 1),
        );
    }
    let error = validate(&schedule, Sends::Buffered).unwrap_err().to_string();
    assert!(error.contains("stage 2: ReceiveActivation") && error.contains("meets"), "{error}");
}

#[test]
fn numbers_that_make_no_schedule_are_refused() {
    let refused = |kind, p, m| Schedule::new(kind, p, m).unwrap_err().to_string();
    assert!(refused(interleaved(2), 4, 6).contains("not a multiple of 4 stages"));
    assert!(refused(Kind::OneForwardOneBackward, 0, 6).contains("at least 1"));
    assert!(refused(Kind::ZeroBubbleV, usize::MAX, 2).contains("more than"));
    assert!("zb-x".parse::<Kind>().unwrap_err().to_string().contains("zb-x"));
    assert_eq!("interleaved:3".parse::<Kind>().unwrap(), interleaved(3));
}
