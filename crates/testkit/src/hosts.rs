//! Several hosts on one machine, for the paths that cross a network.

/// "Hosts": network namespaces of this machine. The first has a switch, to which the others are wired.
#[derive(Debug)]
pub struct Hosts {
    names: Vec<String>,
}

impl Hosts {
    /// `None`, with the reason printed, where namespaces are not permitted.
    ///
    /// Tests that run at the same time use different networks: host *i* is `10.231.NETWORK.(i + 1)`.
    pub fn make(count: usize, network: u8) -> Option<Hosts> {
        let id = std::process::id() % 100_000;
        let hosts = Hosts { names: (0..count).map(|host| format!("f{host}n{network}x{id}")).collect() };
        let first = &hosts.names[0];
        let mut commands: Vec<String> =
            hosts.names.iter().map(|name| format!("ip netns add {name}")).collect();
        commands.extend([
            format!("ip -n {first} link add switch type bridge"),
            format!("ip -n {first} addr add 10.231.{network}.1/24 dev switch"),
            format!("ip -n {first} link set switch up"),
        ]);
        for (host, name) in hosts.names.iter().enumerate().skip(1) {
            commands.extend([
                format!("ip link add wire{host} netns {first} type veth peer name wire netns {name}"),
                format!("ip -n {first} link set wire{host} master switch up"),
                format!("ip -n {name} addr add 10.231.{network}.{}/24 dev wire", host + 1),
                format!("ip -n {name} link set wire up"),
            ]);
        }
        commands.extend(hosts.names.iter().map(|name| format!("ip -n {name} link set lo up")));
        for command in commands {
            let mut words = command.split(' ');
            let output = std::process::Command::new(words.next().unwrap()).args(words).output();
            if !output.as_ref().is_ok_and(|output| output.status.success()) {
                crate::skip::skip("no network namespaces here");
                eprintln!("{command}: {output:?}");
                return None;
            }
        }
        Some(hosts)
    }

    /// The command that starts a rank on one of the hosts.
    pub fn enter(&self, host: usize) -> Vec<String> {
        ["ip", "netns", "exec", &self.names[host]].map(str::to_owned).to_vec()
    }

    /// Cuts the last host's line: packets vanish, and no connection is told.
    pub fn cut(&self) {
        let name = &self.names[self.names.len() - 1];
        let output =
            std::process::Command::new("ip").args(["-n", name, "link", "set", "wire", "down"]).output();
        assert!(output.unwrap().status.success());
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = std::process::Command::new("ip").args(["netns", "del", name]).output();
        }
    }
}
