//! The engine writes what `generate` writes, whoever else is served, however little room there is.

use std::path::Path;
use std::time::Instant;

use super::support::{LIMITS, PATIENCE, device, engine, families, linear_families, model, opened, opened_on};
use ferrospeed_comm::World;
use ferrospeed_models::directory::{WriteOptions, create};
use ferrospeed_models::generate::{GenerateOptions, Sampling, generate};
use ferrospeed_models::pack::pack;
use ferrospeed_models::weights::WeightFiles;
use ferrospeed_models::{Decoder, ModelConfig, WindowRule};
use ferrospeed_serve::core::schedule::{Limits, Refusal};
use ferrospeed_serve::draft::Draft;
use ferrospeed_serve::model::{Division, OpenOptions, open};
use ferrospeed_serve::request::{Event, Finish, Request, Special, Trouble, Work};
use ferrospeed_serve::sampling::SamplingOptions;
use ferrospeed_serve::speculate::Speculation;
use ferrospeed_serve::together::follow;
use ferrospeed_serve::weights_home::WeightsHome;
use ferrospeed_serve::{Engine, ServeError};
use ferrospeed_tensor::memory::Category;
use ferrospeed_tensor::store::PlainStore;
use ferrospeed_tensor::{DType, PackedBits};
use serde_json::json;

const NEW_TOKENS: usize = 24;

fn request(prompt: &[i64], answers: Vec<SamplingOptions>, max_tokens: usize) -> Request {
    let work = Work::Generate {
        answers,
        max_tokens: Some(max_tokens),
        stops: vec![],
        stop_tokens: vec![],
        special: Special::Hidden,
    };
    Request { prompt: prompt.to_vec(), work, first_answer: 0, deadline: Instant::now() + PATIENCE }
}

/// Greedy, with the numbers of its tokens told.
fn greedy() -> SamplingOptions {
    SamplingOptions { logprobs: Some(0), ..Default::default() }
}

fn tokens_of(events: impl Iterator<Item = Event>) -> Vec<i64> {
    events
        .filter_map(|event| match event {
            Event::Token { logprobs, .. } => Some(logprobs.unwrap().0.token),
            Event::Finished { tokens, finish, .. } => {
                assert_eq!((tokens, finish), (NEW_TOKENS, Finish::Length));
                None
            }
            other => panic!("{other:?}"),
        })
        .collect()
}

fn prompts() -> Vec<Vec<i64>> {
    let lengths = [5, 40, 1, 17, 16, 33, 40, 2, 60, 8, 21, 40, 3, 31, 48, 64];
    lengths
        .iter()
        .enumerate()
        .map(|(i, &n)| (0..n).map(|t| (t * 11 + (i as i64 % 5) * 29) % 256).collect())
        .collect()
}

fn written(folder: &tempfile::TempDir) -> Vec<Vec<i64>> {
    let path = folder.path().join("tiny");
    let ModelConfig::Decoder(config) = ModelConfig::from_directory(&path, WindowRule::default()).unwrap()
    else {
        unreachable!("it is a decoder")
    };
    let (model, weights, device) =
        (Decoder::new(*config), WeightFiles::open_directory(&path).unwrap(), ferrospeed_cpu::device());
    let _store = PlainStore::attach(model.parameters().as_slice(), DType::F32, &device, &weights).unwrap();
    let options = GenerateOptions {
        max_new_tokens: NEW_TOKENS,
        sampling: Sampling::Greedy,
        end_tokens: vec![],
        pad_token: 0,
    };
    let write = |prompt: &Vec<i64>| {
        let prompts = std::slice::from_ref(prompt);
        generate(&model, prompts, None, &options, &device, &mut |_, _| {}).unwrap()[0][prompt.len()..]
            .to_vec()
    };
    prompts().iter().map(write).collect()
}

fn serve_all(engine: &Engine) -> Vec<Vec<i64>> {
    let replies: Vec<_> =
        prompts().iter().map(|prompt| engine.ask(request(prompt, vec![greedy()], NEW_TOKENS))).collect();
    replies.into_iter().map(tokens_of).collect()
}

#[test]
fn greedy_answers_are_those_of_generate_alone_together_in_pieces_and_after_preemption() {
    for config in families().into_iter().chain(linear_families()) {
        let name = &config["model_type"];
        let is_linear = config["layer_types"][0] == "linear_attention";
        let folder = model(&config);
        let expected = written(&folder);
        for (what, blocks, limits) in [
            ("together", 200, Limits { pass_tokens: 512, ..LIMITS }),
            ("one by one", 200, Limits { running: 1, ..LIMITS }),
            ("prompts in pieces of 7", 200, Limits { pass_tokens: 7, ..LIMITS }),
            ("in seven blocks", 7, Limits { pass_tokens: 23, ..LIMITS }),
        ] {
            let engine = engine(&folder, blocks, limits);
            assert_eq!(serve_all(&engine), expected, "{name} {what}");
            // Now much of it is found in the cache.
            assert_eq!(serve_all(&engine), expected, "{name} {what}, again");
            engine.stop(Instant::now() + PATIENCE);
            let (metrics, order) = (engine.metrics(), std::sync::atomic::Ordering::Relaxed);
            assert_eq!(metrics.blocks_held.load(order), 0, "{name} {what}: no block is lost");
            if what == "in seven blocks" {
                assert!(metrics.preemptions.load(order) > 0, "{name}: there was not enough room for all");
            } else {
                // What is kept of a text lies in no block that another could begin with.
                assert_eq!(metrics.shared_tokens.load(order) > 0, !is_linear, "{name} {what}");
            }
        }
    }
}

#[test]
fn guesses_are_refused_where_texts_cannot_take_them_back() {
    let folder = model(&linear_families()[0]);
    let (facts, runner, blocks) = opened(&folder, 30);
    assert!(facts.notes().iter().any(|note| note.contains("--max-running")), "{:?}", facts.notes());
    let refused =
        Engine::start_guessing(facts, runner, blocks, LIMITS, Speculation::LookUp { tokens: 4 }).unwrap_err();
    assert!(refused.to_string().contains("--speculate"), "{refused}");
}

#[test]
fn guesses_change_no_token_and_spare_passes() {
    let order = std::sync::atomic::Ordering::Relaxed;
    for config in families() {
        let (name, folder) = (&config["model_type"], model(&config));
        let serve = |speculation, may: bool| {
            let (facts, runner, blocks) = opened(&folder, 30);
            let engine = Engine::start_guessing(facts, runner, blocks, LIMITS, speculation).unwrap();
            let ask = |(index, prompt): (usize, &Vec<i64>)| {
                // Some draw, and some are made to repeat two tokens, now and then another.
                let temperature = [0.0, 0.3, 1.0][index % 3];
                let bias = if index % 2 == 0 { vec![(5, 3.0), (6, 3.0)] } else { vec![(7, 100.0)] };
                let (seed, speculate) = (index as u64, may);
                let options = SamplingOptions { temperature, seed, bias, speculate, ..greedy() };
                engine.ask(request(&prompt.repeat(2), vec![options], NEW_TOKENS))
            };
            let replies: Vec<_> = prompts().iter().enumerate().map(ask).collect();
            let answers: Vec<_> = replies.into_iter().map(tokens_of).collect();
            engine.stop(Instant::now() + PATIENCE);
            let metrics = engine.metrics();
            assert_eq!(metrics.blocks_held.load(order), 0, "{name}: no block is lost");
            let counts =
                [&metrics.guessed_tokens, &metrics.accepted_tokens].map(|counter| counter.load(order));
            (answers, counts)
        };
        let guessing = Speculation::LookUp { tokens: 4 };
        let (expected, none) = serve(Speculation::Off, true);
        let (answers, [guessed, accepted]) = serve(guessing, true);
        assert_eq!(answers, expected, "{name}");
        assert!(none == [0, 0] && 0 < accepted && accepted <= guessed, "{name}: {accepted} of {guessed}");
        assert_eq!(serve(guessing, false), (expected, [0, 0]), "{name}: a request may want none");
    }
}

#[test]
fn an_answer_that_is_drawn_depends_on_its_seed_and_not_on_its_neighbours() {
    let folder = model(&families()[0]);
    let draw = |engine: &Engine, seed, stream| {
        let options = SamplingOptions { temperature: 1.0, seed, stream, ..greedy() };
        engine.ask(request(&[1, 2, 3], vec![options], NEW_TOKENS))
    };
    let engine = engine(&folder, 12, LIMITS);
    let alone = tokens_of(draw(&engine, 7, 0));
    let others: Vec<_> =
        prompts().iter().map(|prompt| engine.ask(request(prompt, vec![greedy()], NEW_TOKENS))).collect();
    assert_eq!(tokens_of(draw(&engine, 7, 0)), alone);
    assert_ne!(tokens_of(draw(&engine, 8, 0)), alone);
    assert_ne!(tokens_of(draw(&engine, 7, 1)), alone);
    others.into_iter().for_each(|replies| assert_eq!(tokens_of(replies).len(), NEW_TOKENS));
}

#[test]
fn troubles_are_told_by_name() {
    let folder = model(&families()[0]);
    let engine = engine(&folder, 4, Limits { running: 1, waiting: 2, ..LIMITS });
    let ask = |request| engine.ask(request).next();
    let refused = ask(request(&[1; 60], vec![greedy()], 5));
    assert_eq!(refused, Some(Event::Trouble(Trouble::Refused(Refusal::TooLong { tokens: 65, most: 64 }))));
    let late = Request { deadline: Instant::now(), ..request(&[1], vec![greedy()], 5) };
    assert_eq!(ask(late), Some(Event::Trouble(Trouble::TimedOut)));
    let many = vec![greedy(); 3];
    assert!(matches!(
        ask(request(&[1], many, 5)),
        Some(Event::Trouble(Trouble::Refused(Refusal::QueueFull { .. })))
    ));
    engine.stop(Instant::now());
    assert_eq!(ask(request(&[1], vec![greedy()], 5)), Some(Event::Trouble(Trouble::ShuttingDown)));
    assert!(!engine.is_alive());
}

#[test]
fn weights_of_few_bits_are_served_and_their_answers_do_not_depend_on_company() {
    // LLaMA, and GPT-2, whose weights lie as `[inputs, outputs]`.
    let folders = [0, 1].map(|family| model(&families()[family]));
    let cases = [PackedBits::Eight, PackedBits::Four]
        .into_iter()
        .flat_map(|bits| folders.iter().map(move |folder| (bits, folder)));
    for (bits, folder) in cases {
        let start = |limits: Limits, path: &Path, packed: Option<PackedBits>| {
            let options = OpenOptions { packed, cache_bytes: 1 << 20, running: 16, ..OpenOptions::default() };
            let (facts, runner, blocks) = open(path, &options, &ferrospeed_cpu::device()).unwrap();
            Engine::start(facts, runner, blocks, limits).unwrap()
        };
        let whole = folder.path().join("tiny");
        let alone = serve_all(&start(Limits { running: 1, pass_tokens: 512, ..LIMITS }, &whole, Some(bits)));
        let together = serve_all(&start(Limits { pass_tokens: 9, ..LIMITS }, &whole, Some(bits)));
        assert_eq!(alone, together, "{bits:?}");
        // A directory that was packed before says the same.
        let packed = folder.path().join(bits.name());
        pack(&whole, &packed, bits, &WriteOptions::default()).unwrap();
        assert_eq!(serve_all(&start(LIMITS, &packed, None)), alone, "{bits:?}, from packed files");
    }
}

#[test]
fn a_smaller_models_guesses_change_no_token_and_a_good_ones_spare_passes() {
    let order = std::sync::atomic::Ordering::Relaxed;
    for (index, config) in families().iter().enumerate() {
        let name = &config["model_type"];
        let (folder, other) = (model(config), tempfile::tempdir().unwrap());
        // Another model of the same tokens: its guesses are bad.
        create(&other.path().join("tiny"), &families()[(index + 1) % 5], 9, &WriteOptions::default())
            .unwrap();
        let serve = |draft: Option<&tempfile::TempDir>, draft_blocks: u64, warm: f32| {
            let (facts, runner, blocks) = opened(&folder, 30);
            let engine = match draft {
                None => Engine::start(facts, runner, blocks, LIMITS),
                Some(draft) => {
                    let (path, device) = (draft.path().join("tiny"), ferrospeed_cpu::device());
                    let options = OpenOptions { cache_bytes: 1, running: 1000, ..OpenOptions::default() };
                    let Err(ServeError::CacheTooSmall { block_bytes, .. }) =
                        Draft::open(&path, &options, &device, &facts, 4)
                    else {
                        unreachable!("a byte holds no block")
                    };
                    let options = OpenOptions { cache_bytes: block_bytes * draft_blocks, ..options };
                    let draft = Draft::open(&path, &options, &device, &facts, 4).unwrap();
                    Engine::start_drafting(facts, runner, blocks, LIMITS, draft)
                }
            };
            let engine = engine.unwrap();
            let ask = |(index, prompt): (usize, &Vec<i64>)| {
                let temperature = [0.0, 0.0, warm][index % 3];
                let options = SamplingOptions { temperature, seed: index as u64, ..greedy() };
                engine.ask(request(prompt, vec![options], NEW_TOKENS))
            };
            let replies: Vec<_> = prompts().iter().enumerate().map(ask).collect();
            let answers: Vec<_> = replies.into_iter().map(tokens_of).collect();
            engine.stop(Instant::now() + PATIENCE);
            let metrics = engine.metrics();
            assert_eq!(metrics.blocks_held.load(order), 0, "{name}: no block is lost");
            let count = |counter: &std::sync::atomic::AtomicU64| counter.load(order);
            (answers, count(&metrics.guessed_tokens), count(&metrics.accepted_tokens), count(&metrics.passes))
        };
        let (expected, _, _, plain_passes) = serve(None, 0, 0.0);
        let (answers, guessed, accepted, passes) = serve(Some(&folder), 200, 0.0);
        assert_eq!(answers, expected, "{name}: its own weights guess");
        assert_eq!(accepted, guessed, "{name}: what the same model says is kept");
        assert!(2 * passes < plain_passes, "{name}: {passes} passes of {plain_passes}");
        let (expected, ..) = serve(None, 0, 0.7);
        assert_eq!(serve(Some(&folder), 200, 0.7).0, expected, "{name}: some are drawn");
        let (answers, guessed, accepted, _) = serve(Some(&other), 200, 0.7);
        assert_eq!(answers, expected, "{name}: another model guesses");
        assert!(0 < guessed && accepted < guessed, "{name}: {accepted} of {guessed}");
        assert_eq!(serve(Some(&folder), 7, 0.7).0, expected, "{name}: a draft with little room");
    }
}

#[test]
fn a_draft_of_another_vocabulary_is_refused() {
    let folder = model(&families()[0]);
    let other = tempfile::tempdir().unwrap();
    let mut config = families()[0].clone();
    config["vocab_size"] = 128.into();
    create(&other.path().join("tiny"), &config, 9, &WriteOptions::default()).unwrap();
    std::fs::write(
        other.path().join("tiny/tokenizer.json"),
        serde_json::json!({"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}})
            .to_string(),
    )
    .unwrap();
    let (facts, ..) = opened(&folder, 8);
    let options = OpenOptions { cache_bytes: 1 << 20, running: 4, ..OpenOptions::default() };
    let refused = Draft::open(&other.path().join("tiny"), &options, &ferrospeed_cpu::device(), &facts, 4);
    let why = refused.err().expect("it knows other tokens").to_string();
    assert!(why.contains("vocabulary of 128") && why.contains("256"), "{why}");
}

/// Heads of 64 channels in 16 bits: what GPUs have their own kernels for.
fn wide_model() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let config = serde_json::json!({
        "model_type": "llama", "vocab_size": 256, "hidden_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256,
        "max_position_embeddings": 1024, "initializer_range": 0.3,
    });
    let options = WriteOptions { dtype: Some(DType::BF16), ..Default::default() };
    create(&folder.path().join("tiny"), &config, 3, &options).unwrap();
    folder
}

#[test]
fn an_answer_has_the_same_tokens_whether_all_logits_are_asked_for_or_the_likeliest_token() {
    let folder = wide_model();
    let (facts, runner, blocks) = opened_on(&folder, 512, &device());
    let engine = Engine::start(facts, runner, blocks, LIMITS).unwrap();
    let text = |sampling: SamplingOptions, prompt: &[i64]| -> String {
        let events = engine.ask(request(prompt, vec![sampling], 300));
        let texts = events.map(|event| match event {
            Event::Token { text, .. } | Event::Finished { text, .. } => text,
            other => panic!("{other:?}"),
        });
        texts.collect()
    };
    for prompt in prompts() {
        // The first answer leaves the prompt in the cache, so that the passes of both others compute the same rows.
        text(greedy(), &prompt);
        assert_eq!(text(SamplingOptions::default(), &prompt), text(greedy(), &prompt), "{prompt:?}");
    }
}

/// What ranks that hold a model together answer, and how many bytes of parameters each has.
fn served_by(
    path: &Path,
    ranks: usize,
    division: Division,
    home: &WeightsHome,
) -> (Vec<Vec<i64>>, Vec<usize>) {
    let rank = |world: World| {
        let (path, home) = (path.to_path_buf(), home.clone());
        std::thread::spawn(move || {
            let group = world.group();
            let options = OpenOptions {
                cache_bytes: 1 << 20,
                running: 16,
                ranks: Some((group.clone(), division)),
                home,
                ..OpenOptions::default()
            };
            let device = ferrospeed_cpu::with_threads(1);
            let (facts, runner, blocks) = open(&path, &options, &device).unwrap();
            let bytes = device.memory_usage().current(Category::Parameters);
            if group.rank() > 0 {
                follow(&group, runner).unwrap();
                return (Vec::new(), bytes);
            }
            let engine = Engine::start(facts, runner, blocks, LIMITS).unwrap();
            let found = serve_all(&engine);
            // A prompt that the model refuses is no business of the other ranks.
            let refused: Vec<Event> = engine.ask(request(&[999], vec![greedy()], 1)).collect();
            assert!(matches!(&refused[..], [Event::Trouble(_)]), "{refused:?}");
            assert_eq!(serve_all(&engine), found, "and once more, from the cache");
            (found, bytes)
        })
    };
    let threads: Vec<_> = World::threads(ranks).into_iter().map(rank).collect();
    let (mut found, bytes): (Vec<_>, Vec<_>) =
        threads.into_iter().map(|thread| thread.join().unwrap()).unzip();
    (found.swap_remove(0), bytes)
}

#[test]
fn a_model_in_slices_writes_what_the_whole_one_writes() {
    for config in families() {
        let folder = model(&config);
        let expected = serve_all(&engine(&folder, 200, LIMITS));
        // Two ranks; and four, of which two share each key-value head of those families that have two.
        for ranks in [2, 4] {
            let path = folder.path().join("tiny");
            let (found, _) = served_by(&path, ranks, Division::Slices, &WeightsHome::Device);
            assert_eq!(found, expected, "{} on {ranks} ranks", config["model_type"]);
        }
    }
}

/// Mixtures of four experts: one without and one with an expert that every token passes.
fn mixtures() -> [serde_json::Value; 2] {
    let mixtral = families().remove(3);
    let mut qwen = mixtral.clone();
    let more = json!({
        "model_type": "qwen2_moe", "num_experts": 4, "moe_intermediate_size": 24, "norm_topk_prob": true,
        "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1,
    });
    qwen.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    qwen.as_object_mut().unwrap().shift_remove("num_local_experts");
    [mixtral, qwen]
}

#[test]
fn a_mixture_with_experts_apart_writes_what_the_whole_one_writes_and_no_rank_holds_all_experts() {
    for config in mixtures() {
        let folder = model(&config);
        let path = folder.path().join("tiny");
        let expected = serve_all(&engine(&folder, 200, LIMITS));
        let held = |division, ranks| {
            let (found, bytes) = served_by(&path, ranks, division, &WeightsHome::Device);
            assert_eq!(found, expected, "{} on {ranks} ranks, {division:?}", config["model_type"]);
            bytes
        };
        let inner = config.get("moe_intermediate_size").or(config.get("intermediate_size")).unwrap();
        let expert_bytes = 2 * 3 * 32 * inner.as_u64().unwrap() as usize * 4;
        let (two, four) = (held(Division::Experts, 2), held(Division::Experts, 4));
        // Of four experts a rank has two, or one.
        assert_eq!((two[0] - four[0], two[1]), (expert_bytes, two[0]), "{}", config["model_type"]);
        // And of the other layers a half.
        let sliced = held(Division::SlicesAndExperts, 2);
        assert!(sliced[0] < two[0] && sliced[0] > 2 * expert_bytes, "{sliced:?} {two:?}");
        let disk = WeightsHome::disk(folder.path());
        assert_eq!(served_by(&path, 2, Division::Experts, &disk).0, expected, "with weights on a disk");
    }
}

/// How likely an engine holds the tokens of texts from `from` on, all of them asked at once.
fn scores(engine: &Engine, texts: &[Vec<i64>], from: usize) -> Vec<Vec<f32>> {
    let ask = |text: &Vec<i64>| {
        let work = Work::Score { from, alternatives: 2 };
        engine.ask(Request {
            prompt: text.clone(),
            work,
            first_answer: 0,
            deadline: Instant::now() + PATIENCE,
        })
    };
    let replies: Vec<_> = texts.iter().map(ask).collect();
    let told = texts.iter().zip(replies).map(|(text, mut events)| match events.next() {
        Some(Event::Scored { tokens, .. }) => {
            let known: Vec<i64> = tokens.iter().map(|(own, _)| own.token).collect();
            assert_eq!(known, text[from.min(text.len())..]);
            for (own, top) in &tokens {
                assert!(top.len() == 2 && top[0].logprob >= top[1].logprob && own.logprob <= top[0].logprob);
            }
            tokens.iter().map(|(own, _)| own.logprob).collect()
        }
        other => panic!("{other:?}"),
    });
    told.collect()
}

#[test]
fn how_likely_a_text_is_depends_on_nobody_else_nor_on_how_little_room_there_is() {
    for config in families() {
        let folder = model(&config);
        let (texts, kind) = (prompts(), &config["model_type"]);
        let alone: Vec<Vec<f32>> = {
            let engine = engine(&folder, 64, LIMITS);
            texts.iter().map(|text| scores(&engine, std::slice::from_ref(text), 1).remove(0)).collect()
        };
        // Blocks for two of the longest: others have to wait, and give theirs back.
        for (blocks, pass_tokens) in [(64, 512), (8, 7)] {
            let engine = engine(&folder, blocks, Limits { pass_tokens, ..LIMITS });
            assert_eq!(scores(&engine, &texts, 1), alone, "{kind}, {blocks} blocks");
            // Beginnings are there by now, and only what is asked for is computed again.
            let later: Vec<Vec<f32>> =
                alone.iter().map(|all| all.iter().skip(19).copied().collect()).collect();
            assert_eq!(scores(&engine, &texts, 20), later, "{kind}, {blocks} blocks, from token 20");
        }
    }
}

#[test]
fn what_a_model_writes_it_holds_as_likely_as_it_said() {
    let folder = model(&families()[0]);
    let engine = engine(&folder, 64, LIMITS);
    let prompt = prompts().remove(1);
    let told: Vec<(i64, f32)> = engine
        .ask(request(&prompt, vec![greedy()], NEW_TOKENS))
        .filter_map(|event| match event {
            Event::Token { logprobs, .. } => logprobs.map(|(own, _)| (own.token, own.logprob)),
            _ => None,
        })
        .collect();
    let written: Vec<i64> = prompt.iter().copied().chain(told.iter().map(|(token, _)| *token)).collect();
    for ((_, told), scored) in told.iter().zip(&scores(&engine, &[written], prompt.len())[0]) {
        assert!((told - scored).abs() < 1e-5, "{told} {scored}");
    }
}
