//! From the environment to findings about the proxy: which clients would use it, and which would go round it. Pure.

use super::{
    Surroundings,
    clients::{FAMILIES, Family, Habit},
    finding::{Finding, Level},
    no_proxy, node,
    proxy_url::{ProxyUrl, Transport},
};
use crate::authority::Authority;

/// Where the proxy is looked for that the environment means, the most widely read first.
const NAMES: [&str; 6] = [
    "HTTPS_PROXY",
    "https_proxy",
    "ALL_PROXY",
    "all_proxy",
    "HTTP_PROXY",
    "http_proxy",
];

/// In which Java looks for options.
const JAVA_OPTIONS: [&str; 3] = ["JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS"];

/// The proxy that the variables mean: the first that is one.
pub(super) fn meant(around: &Surroundings<'_>) -> Option<ProxyUrl> {
    let url = |name: &&str| ProxyUrl::parse(&around.set(name)?).ok();
    NAMES.iter().find_map(url)
}

/// What the variables make of clients that ought to use `proxy`.
pub(super) fn findings(
    around: &Surroundings<'_>,
    proxy: Option<&ProxyUrl>,
    target: &Authority,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    let Some(proxy) = proxy else {
        let text =
            "no variable names a proxy; set what `paceline env` prints, or name it with --proxy";
        return vec![Finding::problem("proxy", text)];
    };
    findings.extend(of_urls(around, proxy));
    let exceptions = of_exceptions(around, target);
    let is_excepted = exceptions.iter().any(|f| f.level == Level::Problem);
    findings.extend(exceptions);
    findings.extend(of_clear_text(around));
    for family in FAMILIES {
        let finding = of_family(around, family, proxy);
        // What leads to the proxy does not lead this host there. (Java alone does not read the exceptions.)
        let is_void = is_excepted && family.proxy != Habit::Java;
        if !(is_void && finding.level == Level::Ok) {
            findings.push(finding);
        }
    }
    findings
}

/// What is wrong with the URLs by themselves.
fn of_urls(around: &Surroundings<'_>, proxy: &ProxyUrl) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut is_named = false;
    for name in NAMES {
        let Some(text) = around.set(name) else {
            continue;
        };
        match ProxyUrl::parse(&text) {
            Ok(url) => {
                is_named |= url == *proxy;
                findings.extend(of_url(name, &url));
            }
            Err(e) => findings.push(Finding::problem(name, e)),
        }
    }
    if !is_named {
        findings.extend(of_url("--proxy", proxy));
    }
    findings
}

fn of_url(name: &str, url: &ProxyUrl) -> Option<Finding> {
    let text = match url.transport {
        Transport::Http => url.quirk,
        Transport::Https => {
            "is https://, but paceline speaks clear text to its clients, and several clients can do nothing else; \
             write http://HOST:PORT"
        }
        Transport::Other => {
            "is not http://, and paceline speaks nothing else; write http://HOST:PORT"
        }
    };
    (!text.is_empty()).then(|| Finding::problem(name, text))
}

/// Hosts that go round the proxy by name.
fn of_exceptions(around: &Surroundings<'_>, target: &Authority) -> Vec<Finding> {
    let mut findings = Vec::new();
    let lists = ["NO_PROXY", "no_proxy"].map(|name| (name, around.set(name)));
    for (name, list) in &lists {
        let Some(list) = list else { continue };
        if let Some(entry) = no_proxy::excepting(list, target) {
            let text = format!(
                "{entry} sends {} round the proxy, whatever the other variables say; take it out",
                target.host
            );
            findings.push(Finding::problem(*name, text));
        }
        if let Some(text) = no_proxy::oddity(list) {
            findings.push(Finding::note(*name, text));
        }
    }
    if let [(_, Some(upper)), (_, Some(lower))] = &lists
        && upper != lower
    {
        let text =
            "differs from no_proxy, and clients differ in which they read; set both to the same";
        findings.push(Finding::note("NO_PROXY", text));
    }
    findings
}

/// Clients of `http://` URLs.
fn of_clear_text(around: &Surroundings<'_>) -> Option<Finding> {
    let text = match (around.set("HTTP_PROXY"), around.set("http_proxy")) {
        (Some(_), None) => "is read by curl, wget and Ruby in lower case alone; set http_proxy too",
        (None, None) => {
            "is not set: http:// URLs go round the proxy; set HTTP_PROXY and http_proxy"
        }
        (_, Some(_)) => return None,
    };
    Some(Finding::note("HTTP_PROXY", text))
}

fn of_family(around: &Surroundings<'_>, family: &Family, proxy: &ProxyUrl) -> Finding {
    let check = format!("{}: proxy", family.name);
    let is_here = family.is_here(around.present);
    let wrong = |text: String| {
        let text = match is_here {
            true => text,
            false => format!("not found here; {text}"),
        };
        let level = match family.minor || !is_here {
            true => Level::Note,
            false => Level::Problem,
        };
        Finding::new(level, check.clone(), with_caveat(text, family))
    };
    let (source, url) = match used(around, family.proxy) {
        Ok(found) => found,
        Err(text) => return wrong(text),
    };
    if url.transport == Transport::Https && !family.tls_to_proxy {
        return wrong(format!(
            "cannot use the https:// proxy of {source}, and some of its clients then go direct; write http://"
        ));
    }
    if url.authority != proxy.authority {
        return wrong(format!(
            "{source} leads to {url}, and not to {proxy}; set it to the same"
        ));
    }
    if let Habit::Node(_) = family.proxy {
        match around.node.map(node::heeds_proxy) {
            Some(true) => {}
            Some(false) => {
                return wrong(
                    "goes direct, whatever the variables: this Node is too old; install 24.5, or 22.21 of 22".to_owned(),
                );
            }
            None => {
                let text = "which version it is cannot be told; look that `node --version` is at least 24.5, or 22.21 of 22";
                return Finding::note(check, with_caveat(text.to_owned(), family));
            }
        }
    }
    Finding::ok(check, with_caveat(format!("by {source}"), family))
}

/// The proxy that clients with this habit use, and where they have it from; or why they go direct, and what to set.
fn used(around: &Surroundings<'_>, habit: Habit) -> Result<(String, ProxyUrl), String> {
    let variables = match habit {
        Habit::Variables(variables) => variables,
        Habit::Node(variables) => {
            let option = around.set("NODE_OPTIONS").unwrap_or_default();
            let is_on = around.set("NODE_USE_ENV_PROXY").as_deref() == Some("1")
                || option.split_whitespace().any(|o| o == "--use-env-proxy");
            if !is_on {
                return Err(
                    "goes direct, whatever the variables; set NODE_USE_ENV_PROXY=1".to_owned(),
                );
            }
            variables
        }
        Habit::Java => return used_by_java(around),
    };
    let Some((name, text)) = variables
        .iter()
        .find_map(|name| Some((*name, around.set(name)?)))
    else {
        let alone = if variables.len() == 1 { " alone" } else { "" };
        return Err(format!(
            "goes direct: it reads {}{alone}; set it",
            listed(variables)
        ));
    };
    match ProxyUrl::parse(&text) {
        Ok(url) => Ok((name.to_owned(), url)),
        Err(e) => Err(format!("{name} {e}")),
    }
}

fn used_by_java(around: &Surroundings<'_>) -> Result<(String, ProxyUrl), String> {
    let option = |name: &str| java_option(around, name);
    let Some((source, host)) = option("https.proxyHost") else {
        return Err(
            "goes direct, whatever the variables; put -Dhttps.proxyHost=HOST -Dhttps.proxyPort=PORT into JAVA_TOOL_OPTIONS"
                .to_owned(),
        );
    };
    let host = match host.contains(':') && !host.starts_with('[') {
        true => format!("[{host}]"),
        false => host,
    };
    // Java's own default.
    let port = option("https.proxyPort").map_or("443".to_owned(), |(_, port)| port);
    match ProxyUrl::parse(&format!("http://{host}:{port}")) {
        Ok(url) => Ok((source.to_owned(), url)),
        Err(_) => Err(format!(
            "{source} has no usable https.proxyHost and https.proxyPort; correct them"
        )),
    }
}

/// The value of `-DNAME=`, and the variable that has it.
pub(super) fn java_option(around: &Surroundings<'_>, name: &str) -> Option<(&'static str, String)> {
    let start = format!("-D{name}=");
    JAVA_OPTIONS.into_iter().find_map(|variable| {
        let options = around.set(variable)?;
        // The last one of a kind counts.
        let value = options
            .split_whitespace()
            .rev()
            .find_map(|o| o.strip_prefix(&start))?;
        Some((variable, value.to_owned()))
    })
}

/// Names in words: "a, b or c".
pub(super) fn listed(names: &[&str]) -> String {
    match names {
        [] => String::new(),
        [one] => (*one).to_owned(),
        [rest @ .., last] => format!("{} or {last}", rest.join(", ")),
    }
}

fn with_caveat(text: String, family: &Family) -> String {
    match family.caveat {
        "" => text,
        caveat => format!("{text} ({caveat})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &[(&str, &str)] = &[
        ("HTTPS_PROXY", "http://p.test:3128"),
        ("https_proxy", "http://p.test:3128"),
        ("HTTP_PROXY", "http://p.test:3128"),
        ("http_proxy", "http://p.test:3128"),
        ("NO_PROXY", "localhost,127.0.0.1,::1"),
        ("no_proxy", "localhost,127.0.0.1,::1"),
        ("NODE_USE_ENV_PROXY", "1"),
        (
            "JAVA_TOOL_OPTIONS",
            "-Dhttps.proxyHost=p.test -Dhttps.proxyPort=3128",
        ),
    ];

    /// The findings in an environment in which every program is found, by level.
    fn found(environment: &[(&str, &str)], level: Level) -> Vec<Finding> {
        let variable = |name: &str| {
            let found = environment.iter().rev().find(|(n, _)| *n == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        let around = Surroundings {
            node: Some((24, 9)),
            variable: &variable,
            present: &|_| true,
        };
        let target = Authority::parse("img.test", Some(443)).expect("an authority");
        let mut found = findings(&around, meant(&around).as_ref(), &target);
        found.retain(|f| f.level == level);
        found
    }

    fn checks(findings: &[Finding]) -> Vec<&str> {
        findings
            .iter()
            .map(|f| f.check.trim_end_matches(": proxy"))
            .collect()
    }

    /// The good environment with one change; an empty value takes a variable away.
    fn with(changes: &[(&'static str, &'static str)]) -> Vec<(&'static str, &'static str)> {
        [GOOD, changes].concat()
    }

    #[test]
    fn what_env_prints_leads_every_client_to_the_proxy() {
        assert_eq!(found(GOOD, Level::Problem), []);
        assert_eq!(found(GOOD, Level::Note), []);
        assert_eq!(found(GOOD, Level::Ok).len(), FAMILIES.len());
    }

    #[test]
    fn each_missing_setting_is_the_problem_of_those_who_read_it() {
        for (name, problems) in [
            ("https_proxy", &["wget"] as &[_]),
            ("HTTPS_PROXY", &[]),
            ("http_proxy", &["Ruby"]),
            ("NODE_USE_ENV_PROXY", &["Node"]),
            ("JAVA_TOOL_OPTIONS", &["Java, OkHttp"]),
            ("NO_PROXY", &[]),
        ] {
            let found = found(&with(&[(name, "")]), Level::Problem);
            assert_eq!(checks(&found), problems, "without {name}");
        }
    }

    #[test]
    fn a_node_is_well_only_if_it_is_sure_to_heed_the_variables() {
        for (node, present, level) in [
            (Some((24, 9)), true, Level::Ok),
            (Some((20, 20)), true, Level::Problem),
            (None, true, Level::Note),
            (None, false, Level::Note),
        ] {
            let variable = |name: &str| {
                let found = GOOD.iter().find(|(n, _)| *n == name);
                found.map(|(_, value)| (*value).to_owned())
            };
            let around = Surroundings {
                variable: &variable,
                present: &|program| present || program == "python3",
                node,
            };
            let target = Authority::parse("img.test", Some(443)).expect("an authority");
            let found = findings(&around, meant(&around).as_ref(), &target);
            let line = found.iter().find(|f| f.check == "Node: proxy");
            assert_eq!(line.map(|f| f.level), Some(level), "{node:?} {line:?}");
        }
    }

    #[test]
    fn without_any_variable_there_is_one_problem() {
        assert_eq!(checks(&found(&[], Level::Problem)), ["proxy"]);
    }

    #[test]
    fn all_proxy_alone_is_heeded_by_some() {
        let problems = found(&[("ALL_PROXY", "http://p.test:3128")], Level::Problem);
        let problems = checks(&problems);
        for direct in [
            "Go",
            "wget",
            "Python urllib, Scrapy, aiohttp",
            "Node",
            "Ruby",
            "Java, OkHttp",
        ] {
            assert!(problems.contains(&direct), "{direct}");
        }
        for proxied in [
            "curl",
            "git",
            "Python requests",
            "Python httpx",
            "Rust reqwest",
            "Chromium",
        ] {
            assert!(!problems.contains(&proxied), "{proxied}");
        }
    }

    #[test]
    fn a_proxy_over_tls_is_a_problem_and_names_who_cannot() {
        let url = "https://p.test:3128";
        let changes = ["HTTPS_PROXY", "https_proxy", "http_proxy"].map(|name| (name, url));
        let problems = found(&with(&changes), Level::Problem);
        let problems = checks(&problems);
        for check in [
            "HTTPS_PROXY",
            "https_proxy",
            "wget",
            "Python urllib, Scrapy, aiohttp",
            "Ruby",
        ] {
            assert!(problems.contains(&check), "{check}: {problems:?}");
        }
        assert!(!problems.contains(&"Go"));
    }

    #[test]
    fn one_spelling_that_leads_elsewhere_is_the_problem_of_those_who_prefer_it() {
        let problems = found(
            &with(&[("https_proxy", "http://u:secret@old.test:3128")]),
            Level::Problem,
        );
        assert!(
            problems
                .iter()
                .all(|f| f.text.contains("leads to http://***@old.test:3128")),
            "{problems:?}"
        );
        assert!(!format!("{problems:?}").contains("secret"));
        let problems = checks(&problems);
        assert!(problems.contains(&"curl") && problems.contains(&"wget"));
        assert!(!problems.contains(&"Go") && !problems.contains(&"Rust reqwest"));
    }

    #[test]
    fn a_url_that_clients_read_differently_is_a_problem() {
        for url in [
            "p.test:3128",
            "http://p.test",
            "http://u@p.test:3128",
            "socks5://p.test:3128",
            "http://",
        ] {
            let problems = found(&with(&[("HTTPS_PROXY", url)]), Level::Problem);
            assert!(
                checks(&problems).contains(&"HTTPS_PROXY"),
                "{url}: {problems:?}"
            );
        }
    }

    #[test]
    fn a_host_that_is_excepted_is_a_problem_and_other_oddities_are_notes() {
        for (list, problem, notes) in [
            ("img.test", true, 1),
            ("*", true, 2),
            ("10.0.0.0/8,127.0.0.1", false, 2),
            ("localhost, 127.0.0.1", false, 2),
            ("localhost,127.0.0.1,::1", false, 0),
        ] {
            let environment = with(&[("NO_PROXY", list)]);
            assert_eq!(
                checks(&found(&environment, Level::Problem)) == ["NO_PROXY"],
                problem,
                "{list}"
            );
            assert_eq!(found(&environment, Level::Note).len(), notes, "{list}");
            // Nobody is said to go by the proxy whom the list leads round it.
            let well = found(&environment, Level::Ok);
            assert_eq!(checks(&well) == ["Java, OkHttp"], problem, "{list}");
        }
    }

    #[test]
    fn the_upper_case_of_http_proxy_is_not_enough() {
        let notes = found(&with(&[("http_proxy", "")]), Level::Note);
        assert!(
            notes
                .iter()
                .any(|f| f.check == "HTTP_PROXY" && f.text.contains("set http_proxy too"))
        );
        let notes = found(
            &with(&[("http_proxy", ""), ("HTTP_PROXY", "")]),
            Level::Note,
        );
        assert!(
            notes
                .iter()
                .any(|f| f.check == "HTTP_PROXY" && f.text.contains("not set"))
        );
    }

    #[test]
    fn a_client_that_is_not_here_has_notes_and_no_problems() {
        let environment = with(&[("NODE_USE_ENV_PROXY", "")]);
        let variable = |name: &str| {
            let found = environment.iter().rev().find(|(n, _)| *n == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        let around = Surroundings {
            node: Some((24, 9)),
            variable: &variable,
            present: &|program| program == "python3",
        };
        let target = Authority::parse("img.test", Some(443)).expect("an authority");
        let found = findings(&around, meant(&around).as_ref(), &target);
        let node = found
            .iter()
            .find(|f| f.check == "Node: proxy")
            .expect("a line");
        assert_eq!(node.level, Level::Note);
        assert!(node.text.starts_with("not found here; "), "{}", node.text);
    }

    #[test]
    fn java_takes_the_last_of_its_options_from_any_of_its_variables() {
        for (options, problem) in [
            ("-Dhttps.proxyHost=p.test -Dhttps.proxyPort=3128", false),
            (
                "-Dhttps.proxyHost=x.test -Dhttps.proxyPort=3128 -Dhttps.proxyHost=p.test",
                false,
            ),
            ("-Dhttps.proxyHost=p.test", true),
            ("-Dhttps.proxyHost=p.test -Dhttps.proxyPort=x", true),
            ("-Dhttp.proxyHost=p.test -Dhttp.proxyPort=3128", true),
        ] {
            let problems = found(&with(&[("JAVA_TOOL_OPTIONS", options)]), Level::Problem);
            assert_eq!(checks(&problems) == ["Java, OkHttp"], problem, "{options}");
        }
    }
}
