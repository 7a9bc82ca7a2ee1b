//! A model that trains and generates on the same weights: what it writes is what `serve` would write with them, in every stage,
//! on ranks that have different texts to write, and training goes on as if nothing had been generated.

use std::path::Path;
use std::sync::Arc;

use super::support::{LIMITS, PATIENCE, device, families, model};
use ferrospeed_comm::World;
use ferrospeed_config::{AutoValues, Config};
use ferrospeed_engine::{Engine as Trainer, Options, Setup, initialize_model};
use ferrospeed_models::{Decoder, ModelConfig, ModelFiles, Tokens};
use ferrospeed_serve::Engine;
use ferrospeed_serve::hybrid::HybridEngine;
use ferrospeed_serve::inference::engine::GenerateCall;
use ferrospeed_serve::model::{OpenOptions, open};
use ferrospeed_serve::request::{Event, Request, Special, Work};
use ferrospeed_serve::sampling::SamplingOptions;
use ferrospeed_serve::weights_home::WeightsHome;
use ferrospeed_tensor::Tensor;
use serde_json::{Value, json};

fn config(zero: &Value, ranks: usize) -> Config {
    let section = json!({
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "hybrid_engine": {"enabled": true, "max_out_tokens": 600},
    });
    let size = (ranks as u64).try_into().unwrap();
    Config::from_value("test", &section).unwrap().resolve(size, &AutoValues::new()).unwrap().0
}

fn trainer(path: &Path, zero: &Value, world: World) -> (Trainer, Arc<Decoder>) {
    let files = ModelFiles::open(path).unwrap();
    let ModelConfig::Decoder(found) = files.model().unwrap() else { panic!("a decoder") };
    let model = Arc::new(Decoder::new(*found));
    let setup = Setup::new(config(zero, world.size()), world, device());
    let options = Options { source: Some(files.weights()), ..Options::default() };
    (initialize_model(&setup, model.parameters(), options).unwrap(), model)
}

fn train(engine: &mut Trainer, model: &Decoder, seed: i64) -> f32 {
    let ids: Vec<i64> = (0..16).map(|place| (place * 7 + seed) % 256).collect();
    let ids = Tensor::from_slice(&ids, [1, 16], engine.device()).unwrap();
    let tokens = Tokens::new(ids.clone());
    let loss = engine.forward(|mode| model.loss(&tokens, &ids, mode)).unwrap();
    let loss = engine.backward(&loss).unwrap();
    engine.step().unwrap();
    loss
}

fn prompts(rank: usize) -> Vec<Vec<i64>> {
    // Of ranks that generate together, the first has most to do and the last nothing.
    let all = vec![vec![1, 2, 3], (0..30).collect(), vec![200], vec![9, 8, 7, 6, 5]];
    all.into_iter().skip(2 * rank).collect()
}

fn call(tokens: usize) -> GenerateCall {
    GenerateCall { max_new_tokens: tokens, ..GenerateCall::default() }
}

/// What `serve` answers with the weights in a directory.
fn served(path: &Path, prompts: &[Vec<i64>], tokens: usize, home: WeightsHome) -> Vec<Vec<i64>> {
    let options = OpenOptions { cache_bytes: 1 << 22, home, ..OpenOptions::default() };
    let (facts, runner, blocks) = open(path, &options, &device()).unwrap();
    let engine = Engine::start(facts, runner, blocks, LIMITS).unwrap();
    let ask = |prompt: &Vec<i64>| {
        let answers = vec![SamplingOptions { logprobs: Some(0), ..Default::default() }];
        let work = Work::Generate {
            answers,
            max_tokens: Some(tokens),
            stops: vec![],
            stop_tokens: vec![],
            special: Special::Hidden,
        };
        let deadline = std::time::Instant::now() + PATIENCE;
        engine.ask(Request { prompt: prompt.clone(), work, first_answer: 0, deadline })
    };
    let replies: Vec<_> = prompts.iter().map(ask).collect();
    let texts = prompts.iter().zip(replies).map(|(prompt, events)| {
        let tokens = events.filter_map(|event| match event {
            Event::Token { logprobs: Some((own, _)), .. } => Some(own.token),
            Event::Trouble(trouble) => panic!("{trouble:?}"),
            _ => None,
        });
        prompt.iter().copied().chain(tokens).collect()
    });
    texts.collect()
}

#[test]
fn what_a_trained_model_writes_is_what_its_weights_write_when_they_are_served() {
    for family in families() {
        let folder = model(&family);
        let path = folder.path().join("tiny");
        for stage in [0, 2, 3] {
            let (mut engine, decoder) = trainer(&path, &json!({"stage": stage}), World::solo());
            let mut hybrid = HybridEngine::new(&engine, decoder.clone()).unwrap();
            let first = hybrid.generate(&prompts(0), &call(20)).unwrap();
            assert_eq!(first, served(&path, &prompts(0), 20, WeightsHome::Device), "{family} {stage}");
            // Weights that a step has changed write something else, without anything being told.
            train(&mut engine, &decoder, 1);
            assert_ne!(hybrid.generate(&prompts(0), &call(20)).unwrap(), first, "{family} {stage}");
        }
    }
}

#[test]
fn ranks_with_other_texts_or_none_generate_together_in_every_stage() {
    let folder = model(&families()[0]);
    let path = folder.path().join("tiny");
    for stage in [1, 3] {
        let ranks = World::threads(3).into_iter().enumerate().map(|(rank, world)| {
            let path = path.clone();
            std::thread::spawn(move || {
                let (mut engine, decoder) = trainer(&path, &json!({"stage": stage}), world);
                let mut hybrid = HybridEngine::new(&engine, decoder.clone()).unwrap();
                // Training between two calls keeps the order in which it reads weights, and so does generation.
                let mut asked = prompts(rank);
                // One that takes two passes, the first of which says nothing.
                asked.extend((rank == 0).then(|| (0..550).map(|place| place % 256).collect()));
                for round in 0..3 {
                    let written = hybrid.generate(&asked, &call(5 + 10 * rank)).unwrap();
                    if round == 0 {
                        let expected = served(&path, &asked, 5 + 10 * rank, WeightsHome::Device);
                        assert_eq!(written, expected, "rank {rank} stage {stage}");
                    }
                    train(&mut engine, &decoder, rank as i64);
                }
                // What one rank refuses none begins.
                let asked = if rank == 1 { vec![vec![999]] } else { prompts(rank) };
                let refused = hybrid.generate(&asked, &call(5));
                match (rank, stage) {
                    (1, _) => assert!(refused.unwrap_err().to_string().contains("token 999")),
                    (_, 3) => assert!(refused.unwrap_err().to_string().contains("rank 1 refuses")),
                    _ => assert!(refused.is_ok()),
                }
                train(&mut engine, &decoder, 5)
            })
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().for_each(|rank| assert!(rank.join().unwrap().is_finite()));
    }
}

#[test]
fn training_takes_the_same_steps_whether_texts_are_written_between_them_or_not() {
    let folder = model(&families()[0]);
    let path = folder.path().join("tiny");
    for stage in [0, 3] {
        let losses = |writes: bool| -> Vec<u32> {
            let (mut engine, decoder) = trainer(&path, &json!({"stage": stage}), World::solo());
            let mut hybrid = HybridEngine::new(&engine, decoder.clone()).unwrap();
            let step = |round| {
                if writes {
                    hybrid.generate(&prompts(0), &call(4)).unwrap();
                }
                train(&mut engine, &decoder, round).to_bits()
            };
            (0..4).map(step).collect()
        };
        assert_eq!(losses(true), losses(false), "stage {stage}");
    }
}

#[test]
fn a_cache_is_kept_or_given_back_and_drawn_texts_can_be_repeated() {
    let folder = model(&families()[0]);
    let path = folder.path().join("tiny");
    for release in [false, true] {
        let (engine, decoder) = trainer(&path, &json!({"stage": 0}), World::solo());
        let options =
            ferrospeed_serve::hybrid::HybridOptions { max_out_tokens: 40, release_inference_cache: release };
        let mut hybrid = HybridEngine::with(&engine, decoder, options).unwrap();
        let sampling = SamplingOptions { temperature: 1.5, seed: 7, ..Default::default() };
        let drawn = GenerateCall { max_new_tokens: 12, sampling, ..GenerateCall::default() };
        // The same prompt twice: each text is drawn for itself.
        let twice = vec![vec![1, 2], vec![1, 2]];
        let first = hybrid.generate(&twice, &drawn).unwrap();
        assert_ne!(first[0], first[1]);
        assert_eq!(hybrid.generate(&twice, &drawn).unwrap(), first);
        assert_eq!(hybrid.holds_cache(), !release);
        // More texts than the cache was made for, and more than are worked on at once.
        let many: Vec<Vec<i64>> = (0..70).map(|token| vec![token]).collect();
        let texts = hybrid.generate(&many, &call(3)).unwrap();
        assert!(texts.iter().zip(&many).all(|(text, prompt)| text.len() == 4 && text[0] == prompt[0]));
        let end = GenerateCall { end_tokens: vec![texts[0][1]], ..call(3) };
        assert_eq!(hybrid.generate(&many[..1], &end).unwrap()[0].len(), 2, "it ends with an end token");
        assert_eq!(hybrid.generate(&many, &call(0)).unwrap(), many);
        let long = hybrid.generate(&[vec![1; 38]], &call(3)).unwrap_err().to_string();
        assert!(long.contains("41") && long.contains("40"), "{long}");
    }
}

#[test]
fn weights_that_wait_on_a_disk_write_what_weights_in_memory_write() {
    let swap = tempfile::tempdir().unwrap();
    for family in families() {
        let folder = model(&family);
        let path = folder.path().join("tiny");
        let expected = served(&path, &prompts(0), 20, WeightsHome::Device);
        for home in [WeightsHome::disk(swap.path()), WeightsHome::host()] {
            assert_eq!(served(&path, &prompts(0), 20, home), expected, "{family}");
        }
    }
    assert_eq!(std::fs::read_dir(swap.path()).unwrap().count(), 0, "nothing of it stays");
    let folder = model(&families()[0]);
    let options = OpenOptions { home: WeightsHome::disk(Path::new("/proc/none")), ..Default::default() };
    let refused =
        open(&folder.path().join("tiny"), &options, &ferrospeed_cpu::device()).err().expect("no such place");
    assert!(refused.to_string().contains("/proc/none"), "{refused}");
}
