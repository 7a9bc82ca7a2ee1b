//! Steps of many ranks on paper, held against formulas, against each other, and against what was published.

use std::num::{NonZeroU64, NonZeroUsize};

use ferrospeed_config::{AutoValues, Config};
use ferrospeed_pipeline::division::Division;
use ferrospeed_tune::cost::{Rates, Reason, step_work};
use ferrospeed_tune::model::{Model, Transformer, from_hugging_face};
use ferrospeed_tune::plan::{Capacity, Operands, Processor, Request};
use ferrospeed_tune::simulate::best::{Open, best};
use ferrospeed_tune::simulate::failures::Failures;
use ferrospeed_tune::simulate::{Machine, Question, Simulated, Spent, simulate};
use ferrospeed_tune::stages::divide;
use serde_json::{Value, json};

const GIB: u64 = 1 << 30;

fn resolve(value: &Value, data_ranks: u64) -> Option<Config> {
    let read = Config::from_value("test", value).ok()?;
    Some(read.resolve(NonZeroU64::new(data_ranks)?, &AutoValues::new().with_hidden_size(4096)).ok()?.0)
}

/// Llama 3.1 8B.
fn eight_billions() -> Transformer {
    let config = json!({
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    });
    from_hugging_face(&config).unwrap()
}

/// Eight H100 of a host, as torchtitan describes them: 400 Gb/s each to other hosts.
fn hosts() -> Machine {
    let rates = Rates {
        flops_per_s: 6e14,
        memory_bytes_per_s: 2.4e12,
        wire_bytes_per_s: 3e11,
        link_bytes_per_s: Some(4e10),
        ranks_per_host: 8,
        host_bytes_per_s: 2e10,
        disk_bytes_per_s: 1e9,
        half_speed_tokens: 2048.0,
    };
    Machine { rates, latency_s: [1e-5, 2e-5], jitter: 0.0, slow: Vec::new(), seed: 1 }
}

struct Run {
    model: Transformer,
    config: Value,
    mesh: [u64; 3],
    recompute: bool,
    length: u64,
}

impl Run {
    fn of(stages: u64, data: u64, tensor: u64, micro_batches: u64) -> Run {
        let config = json!({
            "bf16": {"enabled": true}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": micro_batches,
            "zero_optimization": {"stage": 1}, "pipeline": {"stages": stages},
        });
        Run { model: eight_billions(), config, mesh: [stages, data, tensor], recompute: false, length: 8192 }
    }

    fn on(&self, machine: &Machine) -> Simulated {
        let [stages, data, tensor] = self.mesh;
        let config = resolve(&self.config, data).unwrap();
        let division = NonZeroUsize::new(stages as usize).filter(|stages| stages.get() > 1);
        let division: Option<Division> =
            division.map(|stages| divide(&self.model, &config, stages, self.length).unwrap());
        let model = Model::Transformer(self.model.in_slices(tensor));
        let request = Request {
            model: &model,
            config: &config,
            data_parallel_size: data,
            sequence_ranks: 1,
            sequence_length: self.length,
            checkpoint_activations: self.recompute,
            mlp_chunk: None,
            keeps_attention_matrix: false,
            processor: Processor::Gpu,
            operands: Operands::InPlace,
        };
        simulate(&Question { request, division: division.as_ref(), tensor, machine }).unwrap()
    }
}

/// Nothing takes time but arithmetic.
fn only_arithmetic() -> Machine {
    let rates = Rates {
        memory_bytes_per_s: f64::INFINITY,
        wire_bytes_per_s: f64::INFINITY,
        link_bytes_per_s: None,
        half_speed_tokens: 0.0,
        ..hosts().rates
    };
    Machine { rates, latency_s: [0.0; 2], ..hosts() }
}

#[test]
fn stages_together_need_the_operations_of_the_whole_model() {
    let tied = Transformer { tied_head: true, ..eight_billions() };
    for (model, tables) in [(eight_billions(), 2), (tied, 1)] {
        let table = model.vocab * model.hidden;
        let mut model = model;
        model.size.total_params = model.layers * model.layer_params + tables * table + model.hidden;
        let needed = |stages: u64| {
            let run = Run { model, ..Run::of(stages, 16 / stages, 2, 8 * stages) };
            let step = run.on(&hosts());
            step.flops_per_s * step.ranks as f64 * step.step_s
        };
        let whole = needed(1);
        for stages in [2, 4, 8] {
            let apart = needed(stages);
            assert!(
                (apart / whole - 1.0).abs() < 1e-6,
                "{stages} stages, {tables} tables: {apart} of {whole}"
            );
        }
    }
}

#[test]
fn one_rank_takes_what_its_operations_take() {
    let run = Run::of(1, 1, 1, 4);
    let config = resolve(&run.config, 1).unwrap();
    let model = Model::Transformer(run.model);
    let request = Request {
        model: &model,
        config: &config,
        data_parallel_size: 1,
        sequence_ranks: 1,
        sequence_length: run.length,
        checkpoint_activations: false,
        mlp_chunk: None,
        keeps_attention_matrix: false,
        processor: Processor::Gpu,
        operands: Operands::InPlace,
    };
    let expected = step_work(&request).time(&hosts().rates).total_s();
    let step = run.on(&hosts());
    assert!((step.step_s / expected - 1.0).abs() < 1e-9, "{} and {expected}", step.step_s);
    assert_eq!((step.exposed_s(), step.bubble), (0.0, 0.0));
    // On arithmetic alone a rank reaches its rate.
    let step = run.on(&only_arithmetic());
    assert!((step.flops_per_s / 6e14 - 1.0).abs() < 1e-9, "{}", step.flops_per_s);
}

/// Of `m` micro-batches on `p` even stages 1F1B loses `p - 1` (Narayanan et al. 2021); stages here are not quite even.
#[test]
fn the_bubble_is_the_schedules_and_more_micro_batches_make_it_less() {
    for (stages, micro_batches) in [(2, 4), (4, 8), (4, 32), (8, 16)] {
        let step = Run::of(stages, 1, 1, micro_batches).on(&only_arithmetic());
        let expected = (stages - 1) as f64 / (micro_batches + stages - 1) as f64;
        let lost = 1.0 - step.flops_per_s / 6e14;
        assert!(
            lost >= 0.9 * expected && lost < expected + 0.12,
            "{stages}×{micro_batches}: {lost} {expected}"
        );
    }
    let mut zero_bubble = Run::of(4, 1, 1, 8);
    let even = zero_bubble.on(&only_arithmetic()).step_s;
    zero_bubble.config["pipeline"]["schedule"] = "zb-h1".into();
    assert!(zero_bubble.on(&only_arithmetic()).step_s < even);
}

#[test]
fn what_crosses_between_hosts_costs_more_and_messages_go_beside_compute() {
    // Slices of a host, and slices over two.
    let near = Run::of(1, 1, 8, 1).on(&hosts()).on(Spent::Exposed(Reason::Slices));
    let mut machine = hosts();
    machine.rates.ranks_per_host = 4;
    let far = Run::of(1, 1, 8, 1).on(&machine).on(Spent::Exposed(Reason::Slices));
    assert!(far > 5.0 * near && near > 0.0, "{near} {far}");
    // Stage 3 gathers weights beside compute, as far as it lasts.
    let mut spread = Run::of(1, 64, 1, 1);
    spread.config["zero_optimization"]["stage"] = 3.into();
    let hidden = spread.on(&hosts()).on(Spent::Exposed(Reason::Weights));
    let mut slow = hosts();
    slow.rates.link_bytes_per_s = Some(2e9);
    assert!(spread.on(&slow).on(Spent::Exposed(Reason::Weights)) > 20.0 * hidden, "{hidden}");
}

#[test]
fn a_slow_rank_is_found_and_all_wait_for_it() {
    let run = Run::of(4, 8, 2, 8);
    let even = run.on(&hosts());
    assert_eq!(even.slowest, None);
    let step = run.on(&Machine { slow: vec![(37, 1.5)], ..hosts() });
    assert_eq!(step.slowest, Some(37));
    assert!(
        step.step_s > 1.2 * even.step_s && step.step_s < 1.5 * even.step_s,
        "{} {}",
        even.step_s,
        step.step_s
    );
    let jittered = run.on(&Machine { jitter: 0.1, ..hosts() });
    assert!(jittered.step_s > even.step_s && jittered.step_s < 1.1 * even.step_s + 0.01);
    assert_eq!(run.on(&Machine { jitter: 0.1, ..hosts() }), jittered, "the same seed gives the same step");
}

#[test]
fn sixteen_thousand_ranks_are_simulated_each_at_its_own_pace() {
    let run = Run::of(16, 128, 8, 32);
    let step = run.on(&Machine { jitter: 0.02, ..hosts() });
    assert_eq!((step.ranks, step.hosts, step.samples), (16_384, 2048, 4096));
    assert!(step.events > 16 * 128 * 32 * 2, "{}", step.events);
    assert!(step.on(Spent::Compute) > 0.0 && step.step_s > run.on(&hosts()).step_s);
}

#[test]
fn a_simulated_step_is_shown_as_it_was() {
    let shown = Run::of(4, 32, 8, 16).on(&hosts()).to_string();
    assert_eq!(shown, include_str!("../golden/simulated.txt"), "{shown}");
}

#[test]
fn the_best_layout_fits_and_is_the_fastest_of_those_that_do() {
    let model = eight_billions();
    let config = Run::of(1, 64, 1, 4).config;
    let machine = hosts();
    let open = Open {
        model: &model,
        ds_config: &config,
        ranks: 64,
        samples: 256,
        sequence_length: 8192,
        processor: Processor::Gpu,
        operands: Operands::InPlace,
        capacity: Capacity {
            device_bytes: Some(90 * GIB),
            host_bytes: 900 * GIB,
            nvme_bytes: 0,
            ranks_per_host: 8,
        },
        machine: &machine,
    };
    let (found, looked_at) = best(&open, resolve);
    assert!(found.len() > 5 && found.len() < looked_at, "{} of {looked_at}", found.len());
    assert!(found.windows(2).all(|two| two[0].step.step_s <= two[1].step.step_s));
    assert!(found.iter().all(|fitting| fitting.step.samples == 256 && fitting.step.ranks == 64));
    // With little memory other layouts are left, and none is faster.
    let tight = Capacity { device_bytes: Some(24 * GIB), ..open.capacity };
    let (fewer, _) = best(&Open { capacity: tight, ..open }, resolve);
    assert!(!fewer.is_empty() && fewer.len() < found.len());
    assert!(fewer[0].step.step_s >= found[0].step.step_s);
}

#[test]
fn hosts_that_fail_leave_less_of_the_time_and_saves_come_at_youngs_interval() {
    let failures =
        |hosts: u64| Failures { host_hours: 20_000.0, hosts, save_s: 20.0, restart_s: 300.0, seed: 7 }.run();
    let few = failures(16);
    assert!((few.save_every_s - (2.0f64 * 20.0 * 20_000.0 * 3600.0 / 16.0).sqrt()).abs() < 1.0);
    assert!(few.useful > 0.98, "{few:?}");
    let many = failures(2048);
    assert!(many.useful < few.useful && many.useful > 0.8, "{many:?}");
    // A quarter of a year has so many hours.
    let expected = 90.0 * 24.0 / many.job_hours;
    assert!((many.failures as f64 / expected - 1.0).abs() < 0.15, "{} {expected}", many.failures);
    assert!((many.useful + many.lost.iter().sum::<f64>() - 1.0).abs() < 1e-9);
    assert_eq!(many, failures(2048));
}

/// The ten models of Narayanan et al. 2021 (arXiv:2104.04473), table 1: hidden width, layers, heads, slices, stages, GPUs, samples, and
/// the TFLOP/s that each A100 reached, counted with what is computed again.
const MEGATRON: [(u64, u64, u64, u64, u64, u64, u64, f64); 10] = [
    (2304, 24, 24, 1, 1, 32, 512, 137.0),
    (3072, 30, 32, 2, 1, 64, 512, 138.0),
    (4096, 36, 32, 4, 1, 128, 512, 142.0),
    (6144, 40, 48, 8, 1, 256, 1024, 135.0),
    (8192, 48, 64, 8, 2, 512, 1536, 138.0),
    (10240, 60, 80, 8, 4, 1024, 1792, 140.0),
    (12288, 80, 96, 8, 8, 1536, 2304, 148.0),
    (16384, 96, 128, 8, 16, 1920, 2160, 155.0),
    (20480, 105, 128, 8, 35, 2520, 2520, 163.0),
    (25600, 128, 160, 8, 64, 3072, 3072, 163.0),
];

#[test]
fn megatrons_table_comes_out_within_a_sixth() {
    // A100: 312 TFLOP/s at most, of which a large product reaches about 70 %; NVLink 300 GB/s; 200 Gb/s per GPU between hosts.
    let rates = Rates {
        flops_per_s: 2.2e14,
        memory_bytes_per_s: 1.6e12,
        wire_bytes_per_s: 2.3e11,
        link_bytes_per_s: Some(2e10),
        half_speed_tokens: 512.0,
        ..hosts().rates
    };
    let machine = Machine { rates, ..hosts() };
    let mut worst = 0.0f64;
    for (hidden, layers, heads, tensor, stages, gpus, samples, published) in MEGATRON {
        let model = from_hugging_face(&json!({
            "model_type": "gpt2", "vocab_size": 51200, "n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": 2048,
        }))
        .unwrap();
        let data = gpus / (tensor * stages);
        let mut run = Run::of(stages, data, tensor, samples / data);
        run.config["zero_optimization"]["stage"] = 0.into();
        (run.model, run.length, run.recompute) = (model, 2048, true);
        let step = run.on(&machine);
        // They count four forwards' worth of operations, of which the model needs three.
        let reached = step.flops_per_s / 1e12 * 4.0 / 3.0;
        println!(
            "{hidden:>6} {layers:>4} tp{tensor} pp{stages:<3} {gpus:>5} GPUs: {reached:>6.1} of {published:>6.1} TFLOP/s, bubble {:.1} %, exposed {:.1} %",
            100.0 * step.bubble,
            100.0 * step.exposed_s() / step.step_s
        );
        worst = worst.max((reached / published - 1.0).abs());
    }
    assert!(worst < 0.17, "{worst}");
}
