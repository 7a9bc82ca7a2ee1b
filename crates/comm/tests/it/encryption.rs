//! Encrypted sockets: nobody beside the wire reads what passes over it, and results are the same.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::support::script;
use ferrospeed_comm::{ConnectOptions, World};
use ferrospeed_testkit::hosts::Hosts;
use ferrospeed_testkit::ranks::{Ending, Job, finish, role};
use ferrospeed_testkit::skip::skip;

const LIMIT: Duration = Duration::from_secs(60);
const ENCRYPT: &str = "FERROSPEED_COMM_ENCRYPT";

/// What a rank does when this binary is started as one.
#[test]
fn rank_process() {
    let Some(role) = role() else { return };
    let options = ConnectOptions::from_env().unwrap();
    let world = World::connect(options).unwrap();
    match role.as_str() {
        "script" => script::run(&world, 51, 40),
        "tell" => {
            let text = std::env::var("TEXT").unwrap();
            let own = if world.rank() == 0 { text.as_bytes().to_vec() } else { vec![0; text.len()] };
            let mut all = vec![0u8; own.len() * world.size()];
            world.group().all_gather(&own, &mut all).unwrap();
            assert_eq!(&all[..text.len()], text.as_bytes());
        }
        other => panic!("unknown role {other}"),
    }
}

#[test]
fn encrypted_processes_give_the_reference_bits() {
    for size in [2, 3, 8] {
        let job =
            Job::new(module_path!(), size, "script").with("FERROSPEED_COMM_BACKEND", "tcp").with(ENCRYPT, 1);
        job.run(LIMIT);
    }
    // Without a socket between ranks the connections to rank 0 are encrypted all the same.
    Job::new(module_path!(), 3, "script").with(ENCRYPT, 1).run(LIMIT);
}

#[test]
fn encrypted_hosts_give_the_reference_bits() {
    let Some(hosts) = Hosts::make(2, 9) else { return };
    for layout in [&[0, 1][..], &[0, 0, 1, 1]] {
        let mut job = Job::new(module_path!(), layout.len(), "script")
            .with("MASTER_ADDR", "10.231.9.1")
            .with(ENCRYPT, 1);
        job.prefix = layout.iter().map(|host| hosts.enter(*host)).collect();
        job.run(LIMIT);
    }
}

#[test]
fn ranks_that_disagree_about_encryption_are_told_at_once() {
    // In the second job rank 2 agrees with rank 0, and hears why there is no job.
    for (encrypting, open, size) in [(0, 1, 2), (1, 0, 3)] {
        let job = Job::new(module_path!(), size, "script").with("FERROSPEED_COMM_BACKEND", "tcp");
        let start = |rank| job.clone().with(ENCRYPT, u8::from(rank == encrypting)).start_rank(rank);
        let begun = Instant::now();
        let endings = finish((0..size).map(start).collect(), LIMIT);
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
        let told = format!(
            "rank {encrypting} encrypts its connections and rank {open} does not; set FERROSPEED_COMM_ENCRYPT alike"
        );
        for (rank, Ending { success, output }) in endings.iter().enumerate() {
            assert!(!success && output.contains(&told), "rank {rank}: {output}");
        }
    }
}

/// Listens to all that passes over loopback.
struct Tap(OwnedFd);

impl Tap {
    fn open() -> std::io::Result<Tap> {
        let everything = i32::from((libc::ETH_P_ALL as u16).to_be());
        // SAFETY: plain system calls; the address is plain data that lives through the call that reads it, and the
        // descriptor is nobody else's.
        unsafe {
            let opened = libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, everything);
            if opened < 0 {
                return Err(std::io::Error::last_os_error());
            }
            let tap = Tap(OwnedFd::from_raw_fd(opened));
            let mut address: libc::sockaddr_ll = std::mem::zeroed();
            address.sll_family = libc::AF_PACKET as u16;
            address.sll_protocol = everything as u16;
            address.sll_ifindex = libc::if_nametoindex(c"lo".as_ptr()) as i32;
            let length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
            if libc::bind(opened, (&raw const address).cast(), length) != 0 {
                return Err(std::io::Error::last_os_error());
            }
            let patience = libc::timeval { tv_sec: 0, tv_usec: 100_000 };
            let length = size_of::<libc::timeval>() as libc::socklen_t;
            let patience = (&raw const patience).cast();
            libc::setsockopt(opened, libc::SOL_SOCKET, libc::SO_RCVTIMEO, patience, length);
            Ok(tap)
        }
    }

    /// Whether a packet holds the text, of those that pass until `over`.
    fn hears(&self, text: &[u8], over: &AtomicBool) -> bool {
        let (mut packet, mut heard) = (vec![0u8; 1 << 17], false);
        loop {
            let was_over = over.load(Ordering::SeqCst);
            // SAFETY: the kernel writes at most the buffer's length.
            let read = unsafe { libc::recv(self.0.as_raw_fd(), packet.as_mut_ptr().cast(), packet.len(), 0) };
            match usize::try_from(read) {
                Ok(count) => heard |= packet[..count].windows(text.len()).any(|window| window == text),
                // Nothing for a while, after the end: all has been heard.
                Err(_) if was_over => return heard,
                Err(_) => {}
            }
        }
    }
}

#[test]
fn who_listens_to_the_wire_reads_nothing_of_an_encrypted_job() {
    for (encrypt, is_heard) in [(0, true), (1, false)] {
        let tap = match Tap::open() {
            Ok(tap) => tap,
            Err(error) => return skip(&format!("no raw sockets ({error})")),
        };
        let text = format!("what only ranks may know, {encrypt}, {}", std::process::id());
        let over = AtomicBool::new(false);
        let job =
            Job::new(module_path!(), 2, "tell").with("FERROSPEED_COMM_BACKEND", "tcp").with(ENCRYPT, encrypt);
        let job = job.with("TEXT", &text);
        std::thread::scope(|scope| {
            let listening = scope.spawn(|| tap.hears(text.as_bytes(), &over));
            let ended = std::panic::catch_unwind(|| job.run(LIMIT));
            over.store(true, Ordering::SeqCst);
            assert_eq!(listening.join().unwrap(), is_heard, "encrypt = {encrypt}");
            assert!(ended.is_ok());
        });
    }
}
