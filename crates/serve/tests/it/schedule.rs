//! Random histories of arrivals, departures and limits: everything ends, nothing leaks, no limit is passed.

use std::collections::BTreeMap;

use ferrospeed_serve::core::pool::BLOCK_TOKENS;
use ferrospeed_serve::core::schedule::{Limits, Refusal, Scheduler, SequenceId, Share};
use ferrospeed_testkit::property::{Random, seeds};

/// What the history knows of a sequence: how many tokens it will have, and how many are computed.
struct Client {
    target: usize,
    /// The tokens whose keys and values lie in the cache, by what the passes have computed.
    known: Vec<i64>,
}

/// What lies in each slot of the cache: the token and everything before it, as a hash of the whole beginning.
type Cache = BTreeMap<(u32, usize), Vec<i64>>;

fn prompt(random: &mut Random, most: usize) -> Vec<i64> {
    // Few different beginnings, so that many sequences share them.
    let family = random.below(3) as i64;
    (0..1 + random.below(most)).map(|place| family * 1000 + place as i64 / 20).collect()
}

/// Computes a share as a model would: each token reads everything before it from the blocks, then writes its own.
fn compute(scheduler: &Scheduler, cache: &mut Cache, share: &Share) {
    let sequence = scheduler.sequence(share.id).expect("a planned sequence lives");
    let slot = |place: usize| (sequence.blocks()[place / BLOCK_TOKENS].0, place % BLOCK_TOKENS);
    let tokens = [sequence.tokens(), sequence.guesses()].concat();
    assert!(sequence.guesses().len() == share.guessed && (share.chooses || share.guessed == 0));
    for place in share.first..share.first + share.count {
        for before in 0..place {
            let seen = cache.get(&slot(before)).expect("what comes before is computed");
            assert_eq!(seen[..], tokens[..=before], "the cache holds this very beginning");
        }
        cache.insert(slot(place), tokens[..=place].to_vec());
    }
}

#[test]
fn every_sequence_ends_and_no_block_is_lost_whatever_comes_and_goes() {
    let mut accepted = 0;
    for seed in seeds(150) {
        let mut random = Random(seed);
        let blocks = 2 + random.below(12) as u32;
        let limits = Limits {
            pass_tokens: 1 + random.below(40),
            running: 1 + random.below(6),
            waiting: 1 + random.below(8),
            sequence_tokens: 1 + random.below(blocks as usize * BLOCK_TOKENS),
        };
        let mut scheduler = Scheduler::new(limits, blocks);
        let mut cache = Cache::new();
        let mut clients: BTreeMap<SequenceId, Client> = BTreeMap::new();
        let mut oldest_progress: Option<(SequenceId, usize, usize)> = None;
        let (mut arrivals, mut passes) = (40, 0);
        while arrivals > 0 || !clients.is_empty() {
            passes += 1;
            assert!(passes < 40_000, "seed {seed}: a history of bounded work has an end");
            while arrivals > 0 && random.below(3) > 0 {
                arrivals -= 1;
                let text = prompt(&mut random, 60);
                let (new_tokens, count) = (random.below(30), 1 + random.below(2));
                match scheduler.submit(&text, new_tokens, count) {
                    Ok(ids) => {
                        for id in ids {
                            clients
                                .insert(id, Client { target: text.len() + new_tokens, known: text.clone() });
                        }
                    }
                    Err(Refusal::QueueFull { waiting }) => assert!(waiting + count > limits.waiting),
                    Err(Refusal::TooLong { tokens, most }) => assert!(tokens > most),
                    Err(Refusal::Empty) => unreachable!("prompts have tokens"),
                }
            }
            if random.below(10) == 0 && !clients.is_empty() {
                let gone = *clients.keys().nth(random.below(clients.len())).unwrap();
                clients.remove(&gone);
                scheduler.end(gone);
            }
            // Up to three guesses, of which many come true.
            let guess = |id: SequenceId, tokens: &[i64], _: usize| -> Vec<i64> {
                (0..(id.0 + tokens.len() as u64) % 4).map(|ahead| ahead as i64).collect()
            };
            let plan = scheduler.plan_guessing(guess);
            let (running, _) = scheduler.load();
            assert!(
                running <= limits.running,
                "seed {seed}: waiting sequences may grow by preempted ones, running never"
            );
            assert!(plan.iter().map(|share| share.count).sum::<usize>() <= limits.pass_tokens);
            assert!(plan.iter().all(|share| share.count > 0));
            assert!(plan.is_sorted_by_key(|share| share.id), "older ones first");
            assert_eq!(plan.is_empty(), clients.is_empty(), "seed {seed}: no work is left lying");
            if let Some(&oldest) = clients.keys().next() {
                let share = plan.iter().find(|share| share.id == oldest).expect("the oldest always gets on");
                let progress = (share.id, clients[&oldest].known.len(), share.first);
                assert_ne!(oldest_progress, Some(progress), "and never computes the same twice");
                oldest_progress = Some(progress);
            }
            for share in &plan {
                compute(&scheduler, &mut cache, share);
                scheduler.computed(share);
                if !share.chooses {
                    continue;
                }
                let client = clients.get_mut(&share.id).expect("only living ones are planned");
                assert_eq!(scheduler.sequence(share.id).unwrap().tokens(), client.known);
                if client.known.len() == client.target {
                    clients.remove(&share.id);
                    scheduler.end(share.id);
                    continue;
                }
                let guesses = scheduler.sequence(share.id).unwrap().guesses().to_vec();
                for place in 0..=guesses.len() {
                    let token = if random.below(2) == 0 { place as i64 } else { random.below(50) as i64 };
                    client.known.push(token);
                    assert!(client.known.len() <= client.target, "a guess leaves room for what follows it");
                    let came_true = guesses.get(place) == Some(&token);
                    assert_eq!(scheduler.push(share.id, token), came_true);
                    accepted += u32::from(came_true);
                    if !came_true {
                        break;
                    }
                }
            }
        }
        assert_eq!((scheduler.pool().held(), scheduler.load()), (0, (0, 0)), "seed {seed}");
        assert!(scheduler.plan().is_empty());
    }
    assert!(accepted > 100, "guesses come true");
}

const WIDE: Limits = Limits { pass_tokens: 64, running: 8, waiting: 8, sequence_tokens: 1000 };

fn run_pass(scheduler: &mut Scheduler) -> Vec<Share> {
    let plan = scheduler.plan();
    plan.iter().for_each(|share| scheduler.computed(share));
    plan
}

#[test]
fn a_beginning_that_is_there_is_not_computed_again() {
    let mut scheduler = Scheduler::new(WIDE, 32);
    let text: Vec<i64> = (0..50).collect();
    let first = scheduler.submit(&text, 5, 1).unwrap()[0];
    assert_eq!(run_pass(&mut scheduler)[0].count, 50);
    scheduler.end(first);
    let second = scheduler.submit(&text, 5, 1).unwrap()[0];
    let share = run_pass(&mut scheduler)[0];
    assert_eq!((share.id, share.first, share.count, share.chooses), (second, 48, 2, true));
    assert_eq!(scheduler.counters().shared_tokens, 48);
    // Of a text that ends with a block, that block is computed again: its last token says what comes next.
    let whole = scheduler.submit(&text[..48], 5, 1).unwrap()[0];
    let share = *run_pass(&mut scheduler).iter().find(|share| share.id == whole).unwrap();
    assert_eq!((share.first, share.count), (32, 16));
}

#[test]
fn a_long_prompt_goes_in_piece_by_piece_beside_texts_that_grow() {
    let mut scheduler = Scheduler::new(Limits { pass_tokens: 20, ..WIDE }, 64);
    let growing = scheduler.submit(&[1, 2], 50, 1).unwrap()[0];
    run_pass(&mut scheduler);
    scheduler.push(growing, 3);
    let long = scheduler.submit(&(0..45).collect::<Vec<i64>>(), 5, 1).unwrap()[0];
    for (first, count, chooses) in [(0, 19, false), (19, 19, false), (38, 7, true)] {
        let plan = run_pass(&mut scheduler);
        assert_eq!(plan[0], Share { id: growing, first: plan[0].first, count: 1, guessed: 0, chooses: true });
        assert_eq!(plan[1], Share { id: long, first, count, guessed: 0, chooses });
        scheduler.push(growing, 4);
    }
}

#[test]
fn the_youngest_gives_way_when_blocks_run_out_and_comes_back() {
    let mut scheduler = Scheduler::new(WIDE, 4);
    let old = scheduler.submit(&[5; 31], 20, 1).unwrap()[0];
    let young = scheduler.submit(&[6; 31], 20, 1).unwrap()[0];
    assert_eq!(run_pass(&mut scheduler).len(), 2);
    for id in [old, young] {
        scheduler.push(id, 1);
    }
    run_pass(&mut scheduler);
    for id in [old, young] {
        scheduler.push(id, 2);
    }
    let plan = run_pass(&mut scheduler);
    assert_eq!(plan.iter().map(|share| share.id).collect::<Vec<_>>(), [old]);
    assert_eq!((scheduler.counters().preemptions, scheduler.load()), (1, (1, 1)));
    scheduler.end(old);
    let plan = run_pass(&mut scheduler);
    assert_eq!((plan[0].id, plan[0].chooses), (young, true), "with the tokens that it had");
    assert_eq!(plan[0].first + plan[0].count, 33);
}

#[test]
fn what_can_never_fit_is_refused_at_the_door() {
    let mut scheduler = Scheduler::new(Limits { waiting: 2, ..WIDE }, 2);
    assert_eq!(scheduler.submit(&[], 1, 1), Err(Refusal::Empty));
    assert_eq!(scheduler.submit(&[1; 30], 3, 1), Err(Refusal::TooLong { tokens: 33, most: 32 }));
    assert_eq!(scheduler.submit(&[1], usize::MAX, 1), Err(Refusal::TooLong { tokens: usize::MAX, most: 32 }));
    assert!(scheduler.submit(&[1], 1, 2).is_ok());
    assert_eq!(scheduler.submit(&[1], 1, 1), Err(Refusal::QueueFull { waiting: 2 }));
}
