//! Strangers in every place of the exchange.

use std::net::TcpListener;
use std::time::Duration;

use super::*;

const CLAIM: Claim = Claim { purpose: Purpose::Collectives, group: 7, from_rank: 1, to_rank: 2 };

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(5)
}

fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let calling = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (calling, listener.accept().unwrap().0)
}

fn meet(calling_token: &str, listening_token: &str) -> (Result<(), Unproven>, Result<Claim, Unproven>) {
    let keys = [calling_token, listening_token].map(JobKey::of_token);
    let (called, answered) = meet_with(&keys[0], &keys[1]);
    (called.map(drop), answered.map(|(claim, _)| claim))
}

type Met = (Result<Option<Seal>, Unproven>, Result<(Claim, Option<Seal>), Unproven>);

fn meet_with(mine: &JobKey, theirs: &JobKey) -> Met {
    let (calling, listening) = pair();
    std::thread::scope(|scope| {
        let answered =
            scope.spawn(|| answer(Timed { stream: &listening, deadline: soon() }, theirs, |_| Ok(())));
        let called = call(Timed { stream: &calling, deadline: soon() }, mine, CLAIM);
        (called, answered.join().unwrap())
    })
}

#[test]
fn holders_of_the_token_become_a_link_and_others_do_not() {
    let (called, answered) = meet("secret", "secret");
    called.unwrap();
    assert_eq!(answered.unwrap(), CLAIM);
    let (called, answered) = meet("guess", "secret");
    assert!(matches!(called, Err(Unproven::TurnedAway(reason)) if reason.contains("job token")));
    assert!(matches!(answered, Err(Unproven::Stranger)));
}

#[test]
fn both_ends_seal_a_connection_or_neither() {
    let [open, sealed] = [false, true].map(|seals| JobKey::of_token("secret").sealing(seals));
    let (called, answered) = meet_with(&sealed, &sealed);
    assert!(called.unwrap().is_some() && answered.unwrap().1.is_some());
    let (called, answered) = meet_with(&open, &open);
    assert!(called.unwrap().is_none() && answered.unwrap().1.is_none());
    // Rank 1 calls rank 2.
    for (calls, listens, wanted) in [(&open, &sealed, (2, 1)), (&sealed, &open, (1, 2))] {
        let (called, answered) = meet_with(calls, listens);
        for told in [called.err(), answered.err()] {
            let Some(Unproven::SealsDiffer { sealing, open }) = told else { panic!("{told:?}") };
            assert_eq!((sealing, open), wanted);
        }
    }
    let (called, answered) = meet_with(&sealed, &JobKey::of_token("guess").sealing(true));
    assert!(called.is_err() && matches!(answered, Err(Unproven::Stranger)));
}

/// What a caller says when the listener's random value is `nonce`.
fn said_by_a_caller(key: &JobKey, nonce: [u8; NONCE_BYTES]) -> Vec<u8> {
    let (calling, mut listening) = pair();
    std::thread::scope(|scope| {
        let called = scope.spawn(|| call(Timed { stream: &calling, deadline: soon() }, key, CLAIM));
        listening.write_all(&[&MAGIC[..], &nonce].concat()).unwrap();
        let mut said = vec![0u8; MAGIC.len() + NONCE_BYTES + CLAIM_BYTES + TAG_BYTES];
        listening.read_exact(&mut said).unwrap();
        drop(listening);
        assert!(called.join().unwrap().is_err());
        said
    })
}

/// Says `words` to a listener and gives its whole answer, with what it took the caller for.
fn say(key: &JobKey, words: impl FnOnce([u8; NONCE_BYTES]) -> Vec<u8>) -> (Vec<u8>, Result<Claim, Unproven>) {
    let (mut calling, listening) = pair();
    std::thread::scope(|scope| {
        let answered = scope.spawn(move || {
            let answered = answer(Timed { stream: &listening, deadline: soon() }, key, |_| Ok(()));
            drop(listening);
            answered.map(|(claim, _)| claim)
        });
        let mut greeting = [0u8; MAGIC.len() + NONCE_BYTES];
        calling.read_exact(&mut greeting).unwrap();
        let mut nonce = [0u8; NONCE_BYTES];
        nonce.copy_from_slice(&greeting[MAGIC.len()..]);
        calling.write_all(&words(nonce)).unwrap();
        let mut heard = Vec::new();
        let _ = calling.read_to_end(&mut heard);
        (heard, answered.join().unwrap())
    })
}

#[test]
fn a_proof_cannot_be_used_again_or_for_another_link() {
    let key = JobKey::of_token("secret");
    let overheard = said_by_a_caller(&key, [9; NONCE_BYTES]);
    assert!(matches!(say(&key, |_| overheard.clone()).1, Err(Unproven::Stranger)));
    // A stranger between two members relays the listener's random value, but changes who calls.
    let changed = |nonce| {
        let mut words = said_by_a_caller(&key, nonce);
        words[MAGIC.len() + NONCE_BYTES + 16] ^= 2;
        words
    };
    assert!(matches!(say(&key, changed).1, Err(Unproven::Stranger)));
}

#[test]
fn a_listener_cannot_answer_with_the_callers_own_proof() {
    let key = JobKey::of_token("secret");
    let (calling, mut listening) = pair();
    std::thread::scope(|scope| {
        let called = scope.spawn(|| call(Timed { stream: &calling, deadline: soon() }, &key, CLAIM));
        listening.write_all(&[&MAGIC[..], &[3; NONCE_BYTES]].concat()).unwrap();
        let mut said = vec![0u8; MAGIC.len() + NONCE_BYTES + CLAIM_BYTES + TAG_BYTES];
        listening.read_exact(&mut said).unwrap();
        let proof = &said[said.len() - TAG_BYTES..];
        listening.write_all(&[&[1u8][..], proof].concat()).unwrap();
        assert!(matches!(called.join().unwrap(), Err(Unproven::Stranger)));
    });
}

#[test]
fn a_stranger_cannot_make_a_member_give_up() {
    let key = JobKey::of_token("secret");
    let (calling, mut listening) = pair();
    std::thread::scope(|scope| {
        let called = scope.spawn(|| call(Timed { stream: &calling, deadline: soon() }, &key, CLAIM));
        listening.write_all(&[&MAGIC[..], &[3; NONCE_BYTES]].concat()).unwrap();
        listening.read_exact(&mut [0u8; MAGIC.len() + NONCE_BYTES + CLAIM_BYTES + TAG_BYTES]).unwrap();
        listening.write_all(&[&[SEALS_DIFFER][..], &[0; TAG_BYTES]].concat()).unwrap();
        assert!(matches!(called.join().unwrap(), Err(Unproven::Stranger)));
    });
}

#[test]
fn a_stranger_hears_nothing_that_depends_on_the_token() {
    let words = |_| [&MAGIC[..], &[0; NONCE_BYTES], &CLAIM.to_bytes(false), &[0; TAG_BYTES]].concat();
    let heard = ["one", "two"].map(|token| say(&JobKey::of_token(token), words).0);
    assert_eq!(heard[0], heard[1]);
}

#[test]
fn a_caller_that_drips_bytes_ends_at_the_deadline() {
    let (calling, listening) = pair();
    let key = JobKey::of_token("secret");
    let started = Instant::now();
    let deadline = started + Duration::from_millis(300);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while started.elapsed() < Duration::from_secs(2) && (&calling).write_all(&MAGIC[..1]).is_ok() {
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        let outcome = answer(Timed { stream: &listening, deadline }, &key, |_| Ok(()));
        assert!(outcome.is_err() && started.elapsed() < Duration::from_secs(1));
        drop(listening);
    });
}
