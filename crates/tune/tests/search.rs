//! Which layout is fastest, by the model of costs alone and with a few simulated runs.

use std::convert::Infallible;
use std::num::NonZeroU64;

use ferrospeed_config::{AutoValues, Config};
use ferrospeed_tune::cost::{Limit, Rates, Reason};
use ferrospeed_tune::layout::{Layout, Offload, Open, Space};
use ferrospeed_tune::model::{Transformer, from_hugging_face};
use ferrospeed_tune::plan::{Capacity, Processor, Tier};
use ferrospeed_tune::search::{Answer, Found, Question, search};
use ferrospeed_tune::tuning::planned::{self, Candidate, Outcome};
use serde_json::{Value, json};

const GIB: u64 = 1 << 30;

fn resolve(config: &Value, ranks: u64) -> Option<Config> {
    let read = Config::from_value("test", config).ok()?;
    Some(read.resolve(NonZeroU64::new(ranks)?, &AutoValues::new()).ok()?.0)
}

/// The shape of the quickstart's model.
fn quickstart() -> Transformer {
    let config = json!({"model_type": "gpt2", "vocab_size": 257, "n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": 256});
    from_hugging_face(&config).unwrap()
}

fn seven_billions() -> Transformer {
    let config = json!({
        "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 4096,
    });
    from_hugging_face(&config).unwrap()
}

/// What is left open, where nothing but an optimizer is said.
fn open() -> Value {
    json!({"bf16": {"enabled": true}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}})
}

fn gpus() -> Rates {
    Rates {
        flops_per_s: 4e14,
        memory_bytes_per_s: 2e12,
        wire_bytes_per_s: 2e11,
        link_bytes_per_s: Some(2e10),
        ranks_per_host: 8,
        host_bytes_per_s: 2e10,
        disk_bytes_per_s: 1e9,
        half_speed_tokens: 2048.0,
    }
}

struct Case {
    model: Transformer,
    config: Value,
    ranks: u64,
    length: u64,
    processor: Processor,
    capacity: Capacity,
    rates: Rates,
}

impl Case {
    fn on_gpus(config: Value, ranks: u64, device_gib: u64, host_gib: u64) -> Case {
        let capacity = Capacity {
            device_bytes: Some(device_gib * GIB),
            host_bytes: host_gib * GIB,
            nvme_bytes: 0,
            ranks_per_host: 8,
        };
        let (model, length, processor) = (seven_billions(), 4096, Processor::Gpu);
        Case { model, config, ranks, length, processor, capacity, rates: gpus() }
    }

    fn quickstart(config: Value, ranks: u64) -> Case {
        let capacity =
            Capacity { device_bytes: None, host_bytes: 16 * GIB, nvme_bytes: 0, ranks_per_host: ranks };
        let rates = Rates {
            flops_per_s: 5e10,
            memory_bytes_per_s: 5e9,
            wire_bytes_per_s: 2e9,
            link_bytes_per_s: None,
            ranks_per_host: ranks,
            host_bytes_per_s: 1e10,
            disk_bytes_per_s: 1e9,
            half_speed_tokens: 200.0,
        };
        let (model, processor) = (quickstart(), Processor::Cpu);
        Case { model, config, ranks, length: 256, processor, capacity, rates }
    }

    fn space(&self) -> Space {
        Space::left_open_by(&Open {
            ds_config: &self.config,
            model: &self.model,
            ranks: self.ranks,
            sequence_length: self.length,
            processor: self.processor,
            recomputes: false,
            is_divided: false,
        })
    }

    fn answer(&self) -> Answer {
        let question = Question {
            model: &self.model,
            expert_ranks: 1,
            ds_config: &self.config,
            ranks: self.ranks,
            sequence_length: self.length,
            processor: self.processor,
            in_tiles: false,
            capacity: self.capacity,
            rates: self.rates,
        };
        search(&question, &self.space(), resolve)
    }
}

#[test]
fn the_fastest_layout_that_fits_comes_first_and_each_says_what_it_sends() {
    let mut config = open();
    config["train_batch_size"] = 64.into();
    let answer = Case::on_gpus(config, 8, 80, 900).answer();
    let [best, others @ ..] = &answer.fitting[..] else { panic!("nothing fits: {answer:?}") };
    assert!(
        others.iter().all(|other| other.samples_per_s <= best.samples_per_s && other.shortfalls.is_empty())
    );
    assert!(best.plan.total(Tier::Device) <= 80 * GIB, "{}", best.plan);
    assert!(answer.fitting.iter().all(|found| found.samples == 64), "the batch of a step stays");
    let sent = |tensor: u64, sequence: u64| -> Vec<Reason> {
        let is_it = |found: &&Found| (found.layout.tensor, found.layout.sequence) == (tensor, sequence);
        let found = answer.fitting.iter().find(is_it).unwrap_or_else(|| panic!("no tp{tensor}_sp{sequence}"));
        found.work.sent.iter().map(|sent| sent.reason).collect()
    };
    assert_eq!(sent(8, 1), [Reason::Slices]);
    assert!(sent(1, 8).contains(&Reason::Sequences) && sent(2, 2).contains(&Reason::Gradients));
}

#[test]
fn what_cannot_fit_is_refused_and_the_nearest_says_what_is_missing() {
    let answer = Case::on_gpus(open(), 2, 8, 8).answer();
    assert!(answer.fitting.is_empty(), "{:?}", answer.fitting.first().map(|found| found.layout));
    let nearest = answer.nearest.expect("something lacks least");
    let short = nearest.shortfalls[0];
    assert!(short.needed_bytes > short.available_bytes, "{short:?}");
    // With room in the host's memory, state waits there.
    let answer = Case::on_gpus(open(), 2, 16, 900).answer();
    let best = answer.fitting.first().expect("offloaded state fits");
    assert_ne!(best.layout.offload, Offload::AsConfigured, "{}", best.layout);
    assert!(best.plan.total(Tier::Host) > 0 && best.time.offload_s > 0.0, "{}", best.plan);
}

#[test]
fn a_slow_wire_moves_the_choice_to_what_sends_least() {
    let mut config = open();
    config["train_batch_size"] = 256.into();
    let mut case = Case::on_gpus(config, 8, 140, 2000);
    let fast = case.answer().fitting.remove(0);
    case.rates.wire_bytes_per_s = 1e8;
    let slow = case.answer().fitting.remove(0);
    assert!(slow.work.sent_bytes() < 1.01 * fast.work.sent_bytes(), "{} after {}", slow.layout, fast.layout);
    assert_eq!((slow.layout.tensor, slow.layout.sequence), (1, 1), "{}", slow.layout);
    assert_eq!(slow.time.binding(), Limit::Wire, "{:?}", slow.time);
    // Slices on two hosts send over the link between them.
    let spans = |found: &Found| found.work.sent.iter().map(|sent| sent.span).max().unwrap_or(0);
    assert_eq!(spans(&slow), 8);
}

#[test]
fn what_is_written_stays_and_lists_are_choices() {
    let mut config = open();
    config["zero_optimization"] = json!({"stage": [1, 3]});
    config["train_micro_batch_size_per_gpu"] = json!([2, 4]);
    config["tensor_parallel"] = json!({"autotp_size": 2});
    let space = Case::quickstart(config, 4).space();
    assert_eq!((&space.stages, &space.meshes), (&vec![1, 3], &vec![(2, 1), (2, 2)]));
    assert_eq!(space.layouts(4).len(), 2 * 2 * 2 * 2);
    // Four heads are not cut into eight slices.
    let meshes = Case::quickstart(open(), 8).space().meshes;
    assert!(meshes.contains(&(4, 2)) && meshes.contains(&(1, 8)) && !meshes.iter().any(|mesh| mesh.0 == 8));
    let layout = Layout {
        stage: 3,
        micro_batch: 2,
        accumulation: 4,
        recompute: true,
        tensor: 2,
        sequence: 2,
        offload: Offload::Everything,
    };
    assert_eq!(layout.to_string(), "z3_gas4_tmbspg2_tp2_sp2_oa_ac");
    let written = layout.applied_to(&json!({"train_batch_size": 9, "autotuning": {"enabled": true}}));
    assert_eq!(
        written,
        json!({
            "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": true},
                "offload_param": {"device": "cpu", "pin_memory": true}},
            "tensor_parallel": {"autotp_size": 2}, "sequence_parallel_size": 2,
        })
    );
}

/// A machine that is not as the model takes it to be: other rates, a price per exchange, and kernels that like some layouts
/// better than others.
fn real_samples_per_s(found: &Found, rates: &Rates, exchange_s: f64) -> f64 {
    let Layout { stage, micro_batch, accumulation, recompute, tensor, sequence, .. } = found.layout;
    let exchanges = match stage {
        0 | 1 => 2 * found.work.sent.len() as u64,
        2 => 1 + accumulation,
        _ => 12 * accumulation,
    } + accumulation * 18 * (tensor.min(2) - 1 + sequence.min(2) - 1);
    let taste = (u64::from(stage) * 7 + micro_batch * 3 + u64::from(recompute) * 5 + tensor * 11) % 9;
    let seconds = found.work.time(rates).total_s() + exchanges as f64 * exchange_s;
    found.samples as f64 / seconds * (1.0 + 0.005 * taste as f64)
}

#[test]
fn ten_runs_come_within_a_twentieth_of_trying_everything_though_the_model_is_wrong() {
    for ranks in [2, 4] {
        for batch in [None, Some(48)] {
            let mut config = open();
            if let Some(batch) = batch {
                config["train_batch_size"] = batch.into();
            }
            let case = Case::quickstart(config, ranks);
            let fitting = case.answer().fitting;
            let expected = case.rates;
            // Rates that the model does not know, a price per exchange, and what a rank may hold.
            let machines = [
                (Rates { flops_per_s: 2e11, ..expected }, 1e-4, 8 * GIB),
                (Rates { wire_bytes_per_s: 2e8, half_speed_tokens: 2000.0, ..expected }, 1e-3, GIB),
                (Rates { memory_bytes_per_s: 4e10, wire_bytes_per_s: 2e10, ..expected }, 0.0, GIB / 4),
                (Rates { flops_per_s: 1e10, half_speed_tokens: 20.0, ..expected }, 2e-3, GIB / 16),
            ];
            for (rates, exchange_s, room) in machines {
                let needs = |found: &Found| found.plan.total(Tier::Device);
                // The plan is a little too hopeful.
                let measure = |found: &Found| {
                    (needs(found) * 4 / 3 <= room).then(|| real_samples_per_s(found, &rates, exchange_s))
                };
                let fitting: Vec<&Found> = fitting.iter().filter(|found| needs(found) <= room).collect();
                let candidates: Vec<_> = fitting.iter().map(|found| found.candidate()).collect();
                let Ok(tried) = planned::search(&candidates, 10, |layout| {
                    let found = fitting.iter().find(|found| found.layout == *layout).unwrap();
                    Ok::<_, Infallible>(measure(found).map_or(Outcome::OutOfMemory, Outcome::Measured))
                });
                assert!(tried.len() <= 10);
                let reached = tried.iter().filter_map(|tried| tried.outcome.value()).fold(0.0, f64::max);
                let best = fitting.iter().filter_map(|found| Some((found.layout, measure(found)?)));
                let (layout, most) = best.max_by(|one, other| one.1.total_cmp(&other.1)).unwrap();
                let ran: Vec<String> =
                    tried.iter().map(|tried| format!("{} {:?}", tried.candidate, tried.outcome)).collect();
                assert!(
                    reached >= 0.95 * most,
                    "{reached} of {most} ({layout}) on {ranks} ranks, {rates:?}, room {room}:\n{}",
                    ran.join("\n")
                );
            }
        }
    }
}

/// Layouts of one mesh, and what they need: less in higher stages, with recomputation, and by size.
fn grid(expected: impl Fn(&Layout) -> f64) -> Vec<Candidate> {
    let config = json!({"train_micro_batch_size_per_gpu": [1, 2, 4, 8, 16, 32, 64, 128]});
    let space = Space { meshes: vec![(1, 1)], ..Case::quickstart(config, 2).space() };
    let bytes = |layout: &Layout| {
        layout.micro_batch * (8 - u64::from(layout.stage)) * if layout.recompute { 1 } else { 2 }
    };
    let candidate = |layout: Layout| Candidate { layout, expected: expected(&layout), bytes: bytes(&layout) };
    space.layouts(2).into_iter().map(candidate).collect()
}

#[test]
fn nothing_is_tried_twice_and_what_failed_by_memory_rules_out_what_needs_more() {
    let candidates = grid(|layout| layout.micro_batch as f64);
    let mut ran = Vec::new();
    let Ok(tried) = planned::search(&candidates, 100, |candidate| {
        ran.push(*candidate);
        Ok::<_, Infallible>(Outcome::OutOfMemory)
    });
    assert!(!tried.is_empty() && tried.iter().all(|tried| tried.outcome.value().is_none()));
    let bytes = |layout: &Layout| candidates.iter().find(|known| known.layout == *layout).unwrap().bytes;
    assert!(ran.windows(2).all(|two| bytes(&two[1]) < bytes(&two[0])), "{ran:?}");
}

#[test]
fn a_failure_that_is_not_of_memory_says_nothing_about_other_stages() {
    let candidates = grid(|_| 1.0);
    let Ok(tried) = planned::search(&candidates, 100, |candidate| {
        Ok::<_, Infallible>(if candidate.stage == 3 { Outcome::Failed } else { Outcome::Measured(1.0) })
    });
    let stages: std::collections::BTreeSet<u8> = tried.iter().map(|tried| tried.candidate.stage).collect();
    assert_eq!(stages.into_iter().collect::<Vec<_>>(), [0, 1, 2, 3]);
    // Other sizes of a stage that fails are not tried.
    assert_eq!(tried.iter().filter(|tried| tried.candidate.stage == 3).count(), 1);
}
