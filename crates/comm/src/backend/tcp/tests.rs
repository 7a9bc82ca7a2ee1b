//! Ranks whose bytes pass through something that changes one of them.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::auth::JobKey;
use crate::error::{Error, Result};
use crate::rendezvous::Backend;
use crate::state::JobState;
use crate::store::{MemoryStore, Store};
use crate::world::{Limits, World, WorldParts};

/// What a caller says to prove itself: its magic, random bytes, claim and tag.
const PROOF_BYTES: u64 = 8 + 32 + 32 + 32;

/// A store that sends whoever calls rank 1 through a proxy, which changes one bit of what the first caller says.
struct Diverting {
    values: MemoryStore,
    flipped_bit: u64,
}

impl Store for Diverting {
    fn set(&self, key: &str, value: Vec<u8>) -> Result<()> {
        if key != "tcp/1" {
            return self.values.set(key, value);
        }
        let address = String::from_utf8(value).unwrap();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let diverted = listener.local_addr().unwrap().to_string();
        let mut flipped_bit = Some(self.flipped_bit);
        std::thread::spawn(move || {
            // Ends with the test's process, as its callers may come at any time until then.
            for caller in listener.incoming().map_while(std::result::Result::ok) {
                let Ok(listening) = TcpStream::connect(&address) else { return };
                let back = [listening.try_clone().unwrap(), caller.try_clone().unwrap()];
                let bit = flipped_bit.take();
                std::thread::spawn(move || pass_on(caller, listening, bit));
                let [from, to] = back;
                std::thread::spawn(move || pass_on(from, to, None));
            }
        });
        self.values.set(key, diverted.into_bytes())
    }

    fn wait(&self, key: &str, deadline: Instant, state: &JobState) -> Result<Option<Vec<u8>>> {
        self.values.wait(key, deadline, state)
    }

    fn remove(&self, key: &str) -> Result<()> {
        self.values.remove(key)
    }
}

/// Hands on what comes, with one bit of it changed.
fn pass_on(mut from: TcpStream, mut to: TcpStream, flipped_bit: Option<u64>) {
    let (mut passed, mut buffer) = (0u64, vec![0u8; 1 << 16]);
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        if let Some(bit) = flipped_bit
            && let Some(at) = (bit / 8).checked_sub(passed).filter(|at| *at < count as u64)
        {
            buffer[at as usize] ^= 1 << (bit % 8);
        }
        passed += count as u64;
        if to.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}

/// What three ranks get from an all_gather of `bytes` each, on their way one bit is changed between ranks 0 and 1.
fn gather_with_flip(bytes: usize, flipped_bit: u64) -> Vec<Result<Vec<u8>>> {
    let (state, store) = (Arc::new(JobState::new(3)), MemoryStore::default());
    let store: Arc<dyn Store> = Arc::new(Diverting { values: store, flipped_bit });
    let limits = Limits { deadline: Duration::from_secs(20), ..Limits::default() };
    let rank = |rank: usize| {
        let (state, departed, store) = (Arc::clone(&state), Arc::clone(&state), Arc::clone(&store));
        let limits = limits.clone();
        std::thread::spawn(move || {
            let world = World::assemble(WorldParts {
                rank,
                hosts: vec![vec![0], vec![1], vec![2]],
                backend: Backend::Tcp,
                limits,
                key: JobKey::of_token("secret"),
                address: Ipv4Addr::LOCALHOST.into(),
                state,
                store,
                departure: Box::new(move || departed.note_left(rank)),
            })?;
            let mut all = vec![0u8; 3 * bytes];
            world.group().all_gather(&vec![rank as u8; bytes], &mut all)?;
            // Who has got everything in order hears of it here at the latest.
            world.group().barrier()?;
            Ok(all)
        })
    };
    let ranks = [0, 1, 2].map(rank);
    ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
}

#[test]
fn a_bit_that_changes_between_two_ranks_is_noticed_and_both_are_named() {
    let payload = 600_000;
    let fingerprint = size_of::<crate::backend::message::WireFingerprint>() as u64;
    let data = PROOF_BYTES + fingerprint + 4;
    let places = [
        ("a number of the fingerprint", PROOF_BYTES + 8),
        ("the fingerprint's checksum", PROOF_BYTES + fingerprint),
        ("the first byte", data),
        ("the middle, in another piece", data + 400_000),
        ("the last byte", data + payload as u64 - 1),
        ("the checksum", data + payload as u64 + 3),
    ];
    for (what, byte) in places {
        for (rank, got) in gather_with_flip(payload, 8 * byte + 3).into_iter().enumerate() {
            let error = got.map(drop).expect_err(what);
            let error = if let Error::GroupFailed { first, .. } = error { *first } else { error };
            let text = error.to_string();
            let Error::Damaged { from_rank: 0, to_rank: 1, .. } = error else {
                panic!("{what}: {rank}: {text}")
            };
            assert!(text.contains("all_gather") && text.contains("tests.rs"), "{what}: {text}");
        }
    }
    // Where nothing is changed all is well.
    for got in gather_with_flip(payload, u64::MAX) {
        assert!(
            got.unwrap().chunks(payload).zip(0u8..).all(|(part, rank)| part.iter().all(|byte| *byte == rank))
        );
    }
}
