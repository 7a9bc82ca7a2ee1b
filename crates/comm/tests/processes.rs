//! Jobs of real processes that go well, on every backend.

mod support;

use std::time::Duration;

use ferrospeed_comm::{ConnectOptions, World};
use support::processes::{Job, role};
use support::script;

const LIMIT: Duration = Duration::from_secs(60);

/// What a rank does when this binary is started as one.
#[test]
fn rank_process() {
    let Some(role) = role() else { return };
    let world = World::connect(ConnectOptions::from_env().unwrap()).unwrap();
    let number = |name: &str| std::env::var(name).unwrap().parse::<u64>().unwrap();
    match role.as_str() {
        "script" => {
            let backend = std::env::var("EXPECT_BACKEND").unwrap();
            assert_eq!(world.group().backend(), backend);
            script::run(&world, number("SEED"), number("OPERATIONS") as usize);
        }
        other => panic!("unknown role {other}"),
    }
}

fn script_job(size: usize, backend: &str, expected: &str, seed: u64, operations: usize) -> Job {
    Job::new(size, "script")
        .with("FERROSPEED_COMM_BACKEND", backend)
        .with("EXPECT_BACKEND", expected)
        .with("SEED", seed)
        .with("OPERATIONS", operations)
}

#[test]
fn local_processes_give_the_reference_bits() {
    for (size, seed) in [(1, 11), (2, 12), (4, 13), (8, 14)] {
        script_job(size, "auto", "local", seed, 40).run(LIMIT);
    }
}

#[test]
fn tcp_processes_give_the_reference_bits() {
    for (size, seed) in [(2, 21), (3, 22), (8, 23)] {
        script_job(size, "tcp", "tcp", seed, 40).run(LIMIT);
    }
}

#[test]
fn a_ring_of_more_than_eight_ranks_gives_the_reference_bits() {
    script_job(9, "tcp", "tcp", 31, 15).run(LIMIT);
}

/// Two "hosts": network namespaces of this machine, joined by a pair of virtual interfaces.
struct TwoHosts {
    names: [String; 2],
}

impl TwoHosts {
    /// `None`, with the reason printed, where namespaces are not permitted.
    fn make() -> Option<TwoHosts> {
        let id = std::process::id();
        let names = [format!("fsa{id}"), format!("fsb{id}")];
        let hosts = TwoHosts { names };
        let [a, b] = &hosts.names;
        let commands = [
            format!("ip netns add {a}"),
            format!("ip netns add {b}"),
            format!("ip link add ve{a} netns {a} type veth peer name ve{b} netns {b}"),
            format!("ip -n {a} addr add 10.231.7.1/24 dev ve{a}"),
            format!("ip -n {b} addr add 10.231.7.2/24 dev ve{b}"),
            format!("ip -n {a} link set ve{a} up"),
            format!("ip -n {b} link set ve{b} up"),
            format!("ip -n {a} link set lo up"),
            format!("ip -n {b} link set lo up"),
        ];
        for command in commands {
            let mut words = command.split(' ');
            let output = std::process::Command::new(words.next().unwrap()).args(words).output();
            if !output.as_ref().is_ok_and(|output| output.status.success()) {
                eprintln!("skipped: no network namespaces here ({command}: {output:?})");
                return None;
            }
        }
        Some(hosts)
    }

    /// The command that starts a rank on one of the hosts.
    fn enter(&self, host: usize) -> Vec<String> {
        ["ip", "netns", "exec", &self.names[host]].map(str::to_owned).to_vec()
    }
}

impl Drop for TwoHosts {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = std::process::Command::new("ip").args(["netns", "del", name]).output();
        }
    }
}

#[test]
fn two_hosts_give_the_reference_bits() {
    let Some(hosts) = TwoHosts::make() else { return };
    // Three ranks per host in order; one rank per host; hosts that alternate.
    for (layout, expected, seed) in
        [(&[0, 0, 0, 1, 1, 1][..], "hierarchical", 41), (&[0, 1], "tcp", 42), (&[0, 1, 0, 1], "tcp", 43)]
    {
        let mut job = script_job(layout.len(), "auto", expected, seed, 40).with("MASTER_ADDR", "10.231.7.1");
        job.prefix = layout.iter().map(|host| hosts.enter(*host)).collect();
        job.run(LIMIT);
    }
}
