//! Plans for known models, checked against the figures of the ZeRO paper and by hand.

use ferrospeed_config::{AutoValues, Config};
use ferrospeed_models::config::MODEL_TYPES;
use ferrospeed_models::{Decoder, ModelConfig, WindowRule};
use ferrospeed_tune::crossing::{Crossings, Hosts, Way, crossings};
use ferrospeed_tune::estimate::ModelSize;
use ferrospeed_tune::model::{Model, ModelError, Transformer, from_hugging_face};
use ferrospeed_tune::plan::{Capacity, Operands, Plan, Processor, Purpose, Request, Tier, human, plan};
use serde_json::{Value, json};

fn config(value: Value, ranks: u64) -> Config {
    let ranks = ranks.try_into().expect("a positive number of ranks");
    Config::from_value("test", &value).expect("readable").resolve(ranks, &AutoValues::new()).expect("valid").0
}

fn plan_for(model: &Model, value: Value, ranks: u64, checkpoint_activations: bool) -> Plan {
    plan(&Request {
        model,
        config: &config(value, ranks),
        data_parallel_size: ranks,
        sequence_ranks: 1,
        sequence_length: 1024,
        checkpoint_activations,
        mlp_chunk: None,
        keeps_attention_matrix: false,
        processor: Processor::Cpu,
        operands: Operands::InPlace,
    })
}

fn states(plan: &Plan) -> u64 {
    let states = [Purpose::Parameters, Purpose::Gradients, Purpose::OptimizerStates];
    plan.rows.iter().filter(|row| states.contains(&row.purpose)).map(|row| row.bytes).sum()
}

/// 7.5 billion parameters on 64 ranks: 120, 31.4, 16.6 and 1.9 GB (Rajbhandari et al. 2020, figure 1).
#[test]
fn model_states_shrink_as_in_the_zero_paper() {
    let model = Model::Counts(ModelSize { total_params: 7_500_000_000, largest_layer_params: 100_000_000 });
    let gigabytes = |stage: u8| {
        let value = json!({
            "train_micro_batch_size_per_gpu": 1,
            "fp16": { "enabled": true },
            "optimizer": { "type": "Adam" },
            "zero_optimization": { "stage": stage },
        });
        states(&plan_for(&model, value, 64, false)) as f64 / 1e9
    };
    for (stage, expected) in [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)] {
        assert!((gigabytes(stage) - expected).abs() < 0.05, "stage {stage}: {}", gigabytes(stage));
    }
}

#[test]
fn what_compression_has_lost_is_counted() {
    let model = Model::Counts(ModelSize { total_params: 1_000_000, largest_layer_params: 10_000 });
    let megabytes = |optimizer: &str, ranks: u64| {
        let value = json!({
            "train_micro_batch_size_per_gpu": 1,
            "bf16": { "enabled": true },
            "optimizer": { "type": optimizer, "params": { "lr": 0.001 } },
        });
        let plan = plan_for(&model, value, ranks, false);
        let states = plan.rows.iter().filter(|row| row.purpose == Purpose::OptimizerStates);
        states.map(|row| row.bytes).sum::<u64>() as f64 / 1e6
    };
    assert_eq!(megabytes("Adam", 4), 12.0);
    // A rank without peers loses nothing; others as much as they have, and a share of it again.
    assert_eq!(megabytes("OneBitAdam", 1), 12.0);
    assert_eq!(megabytes("OneBitAdam", 4), 12.0 + 4.0 + 1.0);
    assert_eq!(megabytes("ZeroOneAdam", 4), 16.0 + 4.0 + 1.0);
    assert_eq!(megabytes("OneBitLamb", 4), 16.0 + 4.0 + 1.0 + 4.0);
}

#[test]
fn what_is_offloaded_is_counted_where_it_goes() {
    let model = Model::Counts(ModelSize { total_params: 1_000_000, largest_layer_params: 10_000 });
    let value = |zero: Value| {
        json!({
            "train_micro_batch_size_per_gpu": 1,
            "bf16": { "enabled": true },
            "optimizer": { "type": "Adam" },
            "zero_optimization": zero,
        })
    };
    let plain = plan_for(&model, value(json!({ "stage": 3 })), 4, false);
    let offloaded = json!({
        "stage": 3,
        "offload_optimizer": { "device": "nvme", "nvme_path": "/disk" },
        "offload_param": { "device": "cpu" },
    });
    let offloaded = plan_for(&model, value(offloaded), 4, false);
    let on = |plan: &Plan, tier| plan.rows.iter().filter(|r| r.tier == tier).map(|r| r.bytes).sum::<u64>();
    // Host memory is where ranks without a GPU compute: parameters stay, states go to the disk.
    assert_eq!(on(&offloaded, Tier::Nvme), 250_000 * 12);
    assert_eq!(on(&offloaded, Tier::Host), 0);
    let tiles = 250_000 * 12;
    assert_eq!(on(&offloaded, Tier::Device), on(&plain, Tier::Device) - 250_000 * 12 + tiles);
    assert!(plain.notes.is_empty());
    // 600 TB by 3 MB.
    assert!(offloaded.notes[0].contains("200000000 steps"), "{:?}", offloaded.notes);
    // Of a larger model only a few tiles are in memory.
    let large = Model::Counts(ModelSize { total_params: 1 << 34, largest_layer_params: 10_000 });
    let zero =
        json!({"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/disk", "buffer_count": 3}});
    let plan = plan_for(&large, value(zero), 4, false);
    assert_eq!(on(&plan, Tier::Nvme), (1 << 32) * 12);
    assert!(plan.rows.iter().any(|row| row.why.starts_with("3 tiles of 4194304")), "{plan}");
}

#[test]
fn mics_divides_states_among_a_shard_not_among_all_ranks() {
    let model = Model::Counts(ModelSize { total_params: 1_000_000, largest_layer_params: 10_000 });
    let value = |stage: u64, shard: i64| {
        json!({
            "train_micro_batch_size_per_gpu": 1,
            "bf16": { "enabled": true },
            "optimizer": { "type": "Adam" },
            "zero_optimization": { "stage": stage, "mics_shard_size": shard },
        })
    };
    let states = |shard| states(&plan_for(&model, value(3, shard), 8, false));
    assert_eq!(states(2), 500_000 * 16);
    assert_eq!(states(-1), 125_000 * 16);
}

#[test]
fn checkpointing_keeps_layer_inputs_only() {
    let shape = from_hugging_face(&json!({
        "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257,
    }))
    .expect("GPT-2");
    assert_eq!(shape.size.total_params, 124_439_808);
    let value = || json!({ "train_micro_batch_size_per_gpu": 4, "bf16": { "enabled": true } });
    let model = Model::Transformer(shape);
    let activations = plan_for(&model, value(), 1, true).activations.expect("a known shape");
    // 4 samples of 1024 tokens, two bytes per element; a layer keeps 4·768 of the residual stream, 4·768 of attention and
    // 3072 of the feed-forward layer, and in f32 one number per head and two per norm.
    let (layer, input) = (4096 * (2 * (4 * 768 + 4 * 768 + 3072) + 4 * (12 + 4)), 4096 * 2 * 768);
    // The loss holds 256 rows of f32 logits, which are less than 64 MiB and more than 16; their bf16 copy, and three tensors
    // as wide as the stream; ids and statistics.
    let logits = 256 * 50257 * (4 + 2);
    let loss = logits + 3 * input + 4096 * (3 * 4 + 2 * 8);
    // Two gradients of the stream, and one of the feed-forward layer: less than the loss, but more with a layer that is run
    // again.
    let backward = 2 * input + 4096 * 2 * 3072;
    assert!(backward < loss && loss < layer + backward);
    assert_eq!(activations.kept_bytes, 12 * layer + loss);
    assert_eq!(activations.checkpointed_bytes, 12 * input + layer + backward);
    let kept = plan_for(&model, value(), 1, false);
    // The gradient of the head adds up in f32 meanwhile; all gradients take the room that activations leave.
    let (head, gradients) = (50_257 * 768 * 4, 124_439_808 * 2);
    assert_eq!(kept.in_turn_bytes, gradients);
    assert_eq!(kept.total(Tier::Device) + gradients - states(&kept), activations.kept_bytes + head);
    // A GPU takes all rows of this loss at once, in the model's own type.
    let on_gpu = plan(&Request {
        model: &model,
        config: &config(value(), 1),
        data_parallel_size: 1,
        sequence_ranks: 1,
        sequence_length: 1024,
        checkpoint_activations: true,
        mlp_chunk: None,
        keeps_attention_matrix: false,
        processor: Processor::Gpu,
        operands: Operands::InPlace,
    });
    let on_gpu = on_gpu.activations.expect("a known shape");
    let loss_on_gpu = loss - logits + 4096 * 50257 * 2;
    assert_eq!(on_gpu.checkpointed_bytes, 12 * input + loss_on_gpu);
    // It keeps the inner values after the activation too.
    assert_eq!(on_gpu.kept_bytes, 12 * (layer + 4096 * 2 * 3072) + loss_on_gpu);
}

#[test]
fn buckets_are_planned_as_they_are_cut() {
    let model = Model::Counts(ModelSize { total_params: 80_000_000, largest_layer_params: 1_000_000 });
    let buffers = |stage: u8, limit: u64| {
        let value = json!({
            "train_micro_batch_size_per_gpu": 1,
            "bf16": { "enabled": true },
            "zero_optimization": { "stage": stage, "reduce_bucket_size": limit, "overlap_comm": true },
        });
        let plan = plan_for(&model, value, 2, false);
        let rows = plan.rows.iter().filter(|row| row.purpose == Purpose::CommunicationBuffers);
        rows.map(|row| row.bytes).sum::<u64>()
    };
    // The default limit is larger than the model, which is cut into eight all the same.
    assert_eq!((buffers(1, 500_000_000), buffers(2, 500_000_000)), (0, 2 * 10_000_000 * 2));
    assert_eq!(buffers(2, 3_000_000), 2 * 3_000_000 * 2);
}

#[test]
fn a_part_that_stays_is_counted_where_it_stays() {
    let model = Model::Counts(ModelSize { total_params: 1_000_000, largest_layer_params: 10_000 });
    let by_tier = |processor: Processor, purpose: Purpose| {
        let value = json!({
            "train_micro_batch_size_per_gpu": 1,
            "bf16": { "enabled": true },
            "optimizer": { "type": "Adam" },
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": { "device": "nvme", "nvme_path": "/disk", "ratio": 0.25 },
                "offload_param": { "device": "nvme", "nvme_path": "/disk", "max_in_cpu": 600_000 },
            },
        });
        let planned = plan(&Request {
            model: &model,
            config: &config(value, 1),
            data_parallel_size: 1,
            sequence_length: 1024,
            checkpoint_activations: false,
            mlp_chunk: None,
            keeps_attention_matrix: false,
            processor,
            sequence_ranks: 1,
            operands: Operands::InPlace,
        });
        [Tier::Device, Tier::Host, Tier::Nvme].map(|tier| {
            let rows = planned.rows.iter().filter(|row| row.tier == tier && row.purpose == purpose);
            rows.map(|row| row.bytes).sum::<u64>()
        })
    };
    // Whole units of 2048 elements.
    let (in_host, moved) = (600_000 / 2048 * 2048, 250_000 / 2048 * 2048);
    assert_eq!(by_tier(Processor::Gpu, Purpose::Parameters), [0, in_host * 2, (1_000_000 - in_host) * 2]);
    assert_eq!(by_tier(Processor::Cpu, Purpose::Parameters), [in_host * 2, 0, (1_000_000 - in_host) * 2]);
    for processor in [Processor::Cpu, Processor::Gpu] {
        let states = by_tier(processor, Purpose::OptimizerStates);
        assert_eq!(states, [(1_000_000 - moved) * 12, 0, moved * 12]);
    }
}

#[test]
fn what_does_not_fit_is_named_with_need_and_capacity() {
    let model = Model::Counts(ModelSize { total_params: 1_000_000_000, largest_layer_params: 10_000_000 });
    let plan = plan_for(&model, json!({ "train_micro_batch_size_per_gpu": 1 }), 1, false);
    let small =
        Capacity { device_bytes: Some(8 << 30), host_bytes: 64 << 30, nvme_bytes: 0, ranks_per_host: 1 };
    let short = plan.shortfalls(&small);
    assert_eq!(short.len(), 1);
    assert_eq!((short[0].tier, short[0].needed_bytes), (Tier::Device, 16_000_000_000));
    let on_host = Capacity { device_bytes: None, host_bytes: 64 << 30, nvme_bytes: 0, ranks_per_host: 2 };
    assert!(plan.fits(&on_host));
    assert!(!plan.fits(&Capacity { ranks_per_host: 8, ..on_host }));
}

#[test]
fn odd_model_descriptions_are_refused_with_the_key() {
    let unknown = from_hugging_face(&json!({ "model_type": "rnn" })).expect_err("no transformer");
    assert!(unknown.to_string().contains("\"rnn\" is not known"), "{unknown}");
    let missing =
        from_hugging_face(&json!({ "model_type": "llama", "hidden_size": 0 })).expect_err("no width");
    assert_eq!(missing, ModelError::Missing { model_type: "llama".into(), key: "hidden_size" });
    let huge = json!({ "model_type": "gpt2", "n_embd": 1u64 << 40, "n_layer": 1, "n_head": 1, "n_positions": 1, "vocab_size": 1 });
    assert_eq!(from_hugging_face(&huge), Err(ModelError::TooLarge));
}

#[test]
fn sizes_that_are_not_given_are_those_that_the_model_has_then() {
    // A bloom has no usual sizes, and a bert is no decoder; families that are not known here are counted by their parameters.
    let known = |name: &str| {
        !matches!(from_hugging_face(&json!({ "model_type": name })), Err(ModelError::UnknownFamily { .. }))
    };
    let counted = MODEL_TYPES.into_iter().filter(|name| known(name) && !["bloom", "bert"].contains(name));
    assert_eq!(counted.clone().count(), 14);
    for model_type in counted {
        let keys =
            ["n_layer", "num_hidden_layers", "vocab_size", "n_embd", "hidden_size", "intermediate_size"];
        let mut nulls = json!({ "model_type": model_type });
        keys.iter().for_each(|key| nulls[*key] = Value::Null);
        let ModelConfig::Decoder(own) =
            ModelConfig::from_value(&json!({ "model_type": model_type }), WindowRule::default()).unwrap()
        else {
            panic!("{model_type} is a decoder")
        };
        for config in [json!({ "model_type": model_type }), nulls] {
            let found = from_hugging_face(&config).unwrap();
            let sizes =
                [found.hidden, found.layers, found.heads, found.kv_heads, found.head_dim, found.vocab];
            let own = [own.width, own.layers, own.heads, own.kv_heads, own.head_dim, own.vocab];
            assert_eq!(sizes, own.map(|size| size as u64), "{model_type}");
        }
        let positions = from_hugging_face(&json!({ "model_type": model_type })).unwrap().max_positions;
        assert_eq!(positions, own.max_tokens as u64, "{model_type}");
        let counted = Decoder::new(*own).parameters().whole_numel() as u64;
        let planned = from_hugging_face(&json!({ "model_type": model_type })).unwrap().size.total_params;
        assert_eq!(planned, counted, "{model_type}");
    }
}

#[test]
fn sizes_are_printed_in_the_unit_that_suits_them() {
    assert_eq!(human(0), "0 B");
    assert_eq!(human(1536), "1.50 KiB");
    assert_eq!(human(u64::MAX), "16.00 EiB");
}

#[test]
fn absurd_sizes_saturate_instead_of_overflowing() {
    let model = Model::Counts(ModelSize { total_params: u64::MAX, largest_layer_params: u64::MAX });
    for stage in 0..4 {
        let value = json!({ "train_micro_batch_size_per_gpu": 1, "zero_optimization": { "stage": stage } });
        assert!(plan_for(&model, value, 1, false).total(Tier::Device) > 1 << 62);
    }
}

#[test]
fn ranks_of_a_host_have_the_weights_of_stages_one_and_two_in_common() {
    let model = Model::Counts(ModelSize { total_params: 1_000_000, largest_layer_params: 10_000 });
    let needed = |stage: u64| {
        let value = json!({ "train_micro_batch_size_per_gpu": 1, "zero_optimization": { "stage": stage } });
        let capacity = Capacity { device_bytes: None, host_bytes: 0, nvme_bytes: 0, ranks_per_host: 4 };
        plan_for(&model, value, 4, false).shortfalls(&capacity)[0].needed_bytes
    };
    // Weights once, gradients four times, two states of four bytes divided by four; and all of it four times without ZeRO.
    assert_eq!(needed(1), 4_000_000 + 4 * 4_000_000 + 8_000_000);
    assert_eq!(needed(0), 4 * 16_000_000);
}

/// ZeRO++'s table: per rank 3 M without it and 0.75 M with it (Wang et al. 2023), where a host has one rank's worth of them.
#[test]
fn what_hosts_send_falls_as_in_the_zero_plus_plus_paper() {
    let model = Model::Counts(ModelSize { total_params: 1_000_000_000, largest_layer_params: 0 });
    let sent = |zero: Value, ranks: u64, per_host: u64| {
        let mut zero = zero;
        zero["stage"] = 3.into();
        zero["stage3_max_reuse_distance"] = 0.into();
        let value = json!({
            "train_micro_batch_size_per_gpu": 1,
            "bf16": { "enabled": true },
            "optimizer": { "type": "Adam" },
            "zero_optimization": zero,
        });
        let config = config(value, ranks);
        let request = Request {
            model: &model,
            config: &config,
            data_parallel_size: ranks,
            sequence_ranks: 1,
            sequence_length: 1024,
            checkpoint_activations: false,
            mlp_chunk: None,
            keeps_attention_matrix: false,
            processor: Processor::Gpu,
            operands: Operands::InPlace,
        };
        crossings(&request, Hosts::of(per_host))
    };
    assert_eq!(sent(json!({}), 8, 8), None, "one host sends nothing");
    let plain = sent(json!({}), 1000, 1).unwrap();
    let sizes = |bytes: u64| bytes as f64 / 2e9;
    assert!((2.95..3.0).contains(&sizes(plain.configured.sent_bytes)), "{plain:?}");
    let advice = plain.advice.as_deref().unwrap();
    assert!(advice.contains("zero_quantized_gradients") && !advice.contains("hpz"), "{advice}");
    // Where neighbours keep weights among themselves they come once: a quarter of what they are, and gradients.
    let plain = sent(json!({}), 2000, 2).unwrap();
    let least = plain.others.iter().map(|other| other.sent_bytes).min().unwrap();
    assert!((0.74..0.76).contains(&sizes(least)), "{plain:?}");
    assert!(plain.advice.as_deref().unwrap().contains("\"zero_hpz_partition_size\": 2"), "{plain:?}");
    let all = json!({
        "zero_quantized_weights": true, "zero_hpz_partition_size": 8, "zero_quantized_gradients": true,
    });
    let all = sent(all, 16, 8).unwrap();
    assert_eq!((all.configured.way, &all.advice), (Way::AllOfZeroPlusPlus, &None));
    assert!(all.to_string().contains("all of ZeRO++") && all.to_string().contains("as configured"), "{all}");
}

fn mixtral() -> Transformer {
    from_hugging_face(&json!({
        "model_type": "mixtral", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 128,
    }))
    .expect("a mixture")
}

fn crossed(model: Transformer, stage: u8, ranks: u64, on: Hosts) -> Crossings {
    let value = json!({ "train_micro_batch_size_per_gpu": 1, "bf16": { "enabled": true }, "zero_optimization": { "stage": stage } });
    let request = Request {
        model: &Model::Transformer(model),
        config: &config(value, ranks),
        data_parallel_size: ranks,
        sequence_ranks: 1,
        sequence_length: 128,
        checkpoint_activations: false,
        mlp_chunk: None,
        keeps_attention_matrix: false,
        processor: Processor::Cpu,
        operands: Operands::InPlace,
    };
    crossings(&request, on).expect("several hosts")
}

/// The run refuses neighbours that do not divide all ranks, and neighbours on two hosts save nothing.
#[test]
fn only_neighbours_that_divide_the_ranks_and_stay_on_a_host_are_advised() {
    let neighbours = |ranks, per_host| {
        let found = crossed(mixtral(), 3, ranks, Hosts::of(per_host)).to_string();
        let size = found.split("\"zero_hpz_partition_size\": ").nth(1)?;
        size.split(|letter: char| !letter.is_ascii_digit()).next().map(str::to_owned)
    };
    assert_eq!(neighbours(8, 3), None);
    assert_eq!(neighbours(8, 4).as_deref(), Some("4"));
    assert_eq!(neighbours(12, 8).as_deref(), Some("4"));
    assert_eq!(neighbours(8, 1), None);
}

#[test]
fn one_bit_optimizers_are_not_offered_where_ranks_hold_different_parts() {
    let offers = |crossings: &Crossings| crossings.others.iter().any(|other| other.way == Way::OneBit);
    let spread = mixtral().with_experts_over(2).expect("eight experts");
    assert!(offers(&crossed(mixtral(), 0, 4, Hosts::of(2))));
    assert!(!offers(&crossed(spread, 0, 4, Hosts { expert_ranks: 2, ..Hosts::of(2) })));
    assert!(!offers(&crossed(mixtral().in_slices(2), 0, 4, Hosts::of(2))));
}

/// Tokens that leave a host for experts are part of what it sends, and none do where all experts are on it.
#[test]
fn what_a_host_sends_counts_tokens_for_experts_elsewhere() {
    let routed = |ep: u64, ranks: u64, per_host: u64, neighbours: bool| {
        let model = mixtral().with_experts_over(ep).expect("eight experts");
        let on = Hosts { ranks_per_host: per_host, expert_ranks: ep, experts_are_neighbours: neighbours };
        crossed(model, 1, ranks, on).routed_bytes
    };
    assert_eq!(routed(2, 8, 4, true), 0);
    // Each of four ranks sends half of its tokens, twice (to the expert, and what came of those it got), forward and
    // backward, in two layers, to two experts each, as wide as the stream.
    let all = 4 * 128 / 2 * 4 * 2 * 2 * 64 * 2;
    assert_eq!(routed(2, 8, 4, false), all);
    // Of eight ranks that share experts half are elsewhere; of a group that is cut three to one some.
    assert_eq!(routed(8, 8, 4, true), all);
    assert_eq!(routed(4, 8, 3, true), 3 * 128 / 4 * 4 * 2 * 2 * 64 * 2);
    let without = crossed(mixtral(), 1, 8, Hosts::of(4)).configured.sent_bytes;
    let with = crossed(
        mixtral().with_experts_over(8).expect("eight"),
        1,
        8,
        Hosts { expert_ranks: 8, ..Hosts::of(4) },
    );
    assert!(with.configured.sent_bytes >= with.routed_bytes && with.configured.sent_bytes != without);
}

/// `zero_hpz_partition_size` keeps everything once more among neighbours.
#[test]
fn a_second_copy_among_neighbours_is_counted() {
    let model = Model::Counts(ModelSize { total_params: 1_000_000, largest_layer_params: 10_000 });
    let total = |neighbours: u64| {
        let value = json!({
            "train_micro_batch_size_per_gpu": 1, "bf16": { "enabled": true },
            "zero_optimization": { "stage": 3, "zero_hpz_partition_size": neighbours },
        });
        plan_for(&model, value, 8, false).total(Tier::Device)
    };
    assert_eq!(total(4) - total(1), 2 * 1_000_000 / 4);
    assert_eq!(total(8), total(1), "all ranks together hold no second copy");
}
