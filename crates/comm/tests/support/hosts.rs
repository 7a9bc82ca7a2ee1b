//! Two hosts on one machine, for the paths that cross a network.

/// Two "hosts": network namespaces of this machine, joined by a pair of virtual interfaces.
pub struct TwoHosts {
    names: [String; 2],
}

impl TwoHosts {
    /// `None`, with the reason printed, where namespaces are not permitted.
    ///
    /// Tests that run at the same time use different networks `10.231.NETWORK.0`.
    pub fn make(network: u8) -> Option<TwoHosts> {
        let id = std::process::id() % 100_000;
        let names = [format!("fa{network}x{id}"), format!("fb{network}x{id}")];
        let hosts = TwoHosts { names };
        let [a, b] = &hosts.names;
        let commands = [
            format!("ip netns add {a}"),
            format!("ip netns add {b}"),
            format!("ip link add v{a} netns {a} type veth peer name v{b} netns {b}"),
            format!("ip -n {a} addr add 10.231.{network}.1/24 dev v{a}"),
            format!("ip -n {b} addr add 10.231.{network}.2/24 dev v{b}"),
            format!("ip -n {a} link set v{a} up"),
            format!("ip -n {b} link set v{b} up"),
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
    pub fn enter(&self, host: usize) -> Vec<String> {
        ["ip", "netns", "exec", &self.names[host]].map(str::to_owned).to_vec()
    }
}

impl TwoHosts {
    /// Cuts the line: packets vanish, and no connection is told.
    pub fn cut(&self) {
        let name = &self.names[1];
        let output = std::process::Command::new("ip")
            .args(["-n", name, "link", "set", &format!("v{name}"), "down"])
            .output();
        assert!(output.unwrap().status.success());
    }
}

impl Drop for TwoHosts {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = std::process::Command::new("ip").args(["netns", "del", name]).output();
        }
    }
}
